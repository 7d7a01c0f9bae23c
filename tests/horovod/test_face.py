# The Horovod face in one process: its names and signatures, the queries, and operations of a single rank.

import gc
import inspect
import json
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import gossamer as gs
import gossamer.horovod.torch as hvd
from gossamer.horovod.common import exceptions
from gossamer.horovod.common.timeline import Timeline
from gossamer.horovod.torch import mpi_ops

# As Horovod 0.28.1 has them: the order of arguments is part of the interface.
SIGNATURES = {
    "init": "comm process_sets backend",
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async": "tensor average name op prescale_factor postscale_factor process_set",
    "allreduce_async_": "tensor average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors average name compression op prescale_factor postscale_factor process_set",
    "grouped_allreduce_": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async": "tensors average name op prescale_factor postscale_factor process_set",
    "grouped_allreduce_async_": "tensors average name op prescale_factor postscale_factor process_set",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "join": "device process_set",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "start_timeline": "file_path mark_cycles",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
}
QUERIES = [f"{what}_built" for what in ("mpi", "gloo", "ddl", "ccl", "cuda", "rocm")] + [
    "mpi_enabled",
    "gloo_enabled",
]
FAMILY = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


@pytest.fixture
def _alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_in_horovods_order(name) -> None:
    assert " ".join(inspect.signature(getattr(hvd, name)).parameters) == SIGNATURES[name]
    assert getattr(mpi_ops, name) is getattr(hvd, name)


def test_constants_have_horovods_numbers() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))


def test_exceptions_are_what_scripts_catch() -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(exceptions.HorovodVersionMismatchError, ImportError)
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    assert not issubclass(exceptions.HostsUpdatedInterrupt, RuntimeError)


def test_queries_are_truthful() -> None:
    assert all(isinstance(getattr(hvd, query)(), bool) for query in QUERIES)
    assert (hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built()) == (
        True,
        True,
        False,
        False,
    )
    assert hvd.mpi_enabled() is False
    with pytest.raises(ValueError, match="MPI must be enabled"):
        hvd.mpi_threads_supported()
    if torch.version.cuda is None:
        assert (hvd.nccl_built(), hvd.cuda_built()) == (0, False)
    else:
        assert hvd.nccl_built() >= 20000


@pytest.mark.parametrize("ask", [*FAMILY, "stop_timeline"])
def test_asking_before_init_is_an_error(ask) -> None:
    with pytest.raises(ValueError, match=f"hvd.{ask}: Horovod has not been initialized"):
        getattr(hvd, ask)()


def test_operations_before_init_are_an_error() -> None:
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
            call(torch.ones(2))
    for call in (hvd.barrier, hvd.join):
        with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
            call()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.add_process_set([0])
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.size() is None
    hvd.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_sets": "static"}, "'dynamic', got 'static'"),
        ({"process_sets": [[0], [0]]}, "there already"),
        ({"process_sets": [[1]]}, "0 to 0, got \\[1\\]"),
        ({"comm": [0, 1]}, "different ranks of 0 to 0"),
        ({"backend": "carrier pigeon"}, "got 'carrier pigeon'"),
        ({"backend": "cpu:gloo,cuda:pigeon"}, "cuda:pigeon"),
    ],
)
def test_bad_arguments_of_init_leave_nothing_behind(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        hvd.init(**arguments)
    assert not hvd.is_initialized()
    assert not dist.is_initialized()
    assert not gs.is_initialized()


@pytest.mark.usefixtures("_alone")
def test_one_process_is_all() -> None:
    assert [getattr(hvd, ask)() for ask in FAMILY] == [0, 1, 0, 1, 0, 1]
    assert mpi_ops.is_homogeneous()
    x = torch.tensor([3, 5])
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [3, 5]
    assert hvd.allgather(x).tolist() == [3, 5]
    assert hvd.broadcast(x, 0).tolist() == [3, 5]
    assert hvd.alltoall(x).tolist() == [3, 5]
    assert hvd.reducescatter(x).tolist() == [3, 5]
    assert hvd.join() == 0
    hvd.barrier()
    assert hvd.global_process_set.included()
    assert (hvd.global_process_set.rank(), hvd.global_process_set.ranks) == (0, [0])


@pytest.mark.usefixtures("_alone")
def test_a_forked_child_has_no_part_in_it() -> None:
    assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]
    child = os.fork()
    if child == 0:
        refused = False
        try:
            hvd.allreduce_async(torch.ones(2))
        except ValueError as error:
            refused = "fork" in str(error)
        hvd.shutdown()  # does nothing, as at exit
        os._exit(0 if refused and not hvd.is_initialized() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.usefixtures("_alone")
def test_a_join_collects_garbage_only_where_an_optimizer_rides_on_the_engine(monkeypatch) -> None:
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append("all"))
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        hvd.join()
    assert optimizer.report()["way"] == "undecided"
    assert collected == []


def test_the_timeline_is_in_the_file_though_nothing_more_happens(tmp_path) -> None:
    file, timeline = tmp_path / "timeline.json", Timeline()

    def comes(text: str) -> bool:
        end = time.monotonic() + 10
        while time.monotonic() < end and text not in file.read_text():
            time.sleep(0.01)
        return text in file.read_text()

    timeline.start(str(file), mark_cycles=True)
    try:
        assert comes("start_time_since_epoch_in_micros")
        for phase in ("rank_ready", "agreed", "executing", "done"):
            timeline.listener(0)(phase, "allreduce.x", 0, time.monotonic())
        assert comes("CYCLE_START")
        timeline.listener(0)("rank_ready", "allreduce.hangs", 0, time.monotonic())
        assert comes("allreduce.hangs")
    finally:
        timeline.stop()
    assert json.loads(file.read_text())[-1]["name"] == "0"


def test_a_timeline_that_ended_leaves_no_thread(tmp_path) -> None:
    timeline = Timeline()
    before = threading.active_count()
    for turn in range(3):
        timeline.start(str(tmp_path / f"{turn}.json"), mark_cycles=False)
    timeline.stop()
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
