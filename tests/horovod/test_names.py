# Every public name of horovod.torch 0.28.1, and of the modules that scripts import from, exists here. It takes the same
# positional arguments in the same order, with the same defaults, and migrating-from-horovod.md lists it. Other files
# test what the names do.
"""Names and signatures of the Horovod face, and the page that lists them."""

import importlib
import inspect
import os
import threading

import pytest

import gossamer.horovod.torch as hvd
from gossamer import horovod
from gossamer.horovod.common import environment, util
from gossamer.horovod.common.exceptions import HorovodInternalError
from gossamer.horovod.runner.util.threads import in_thread
from tests import ROOT

PAGE = (ROOT / "docs" / "migrating-from-horovod.md").read_text()
NO_DEFAULT = inspect.Parameter.empty

REDUCED = "average=None name=None {}op=None prescale_factor=1.0 postscale_factor=1.0 process_set=hvd.global_process_set"
ALLREDUCE = REDUCED.format("")
COMPRESSED = REDUCED.format("compression=hvd.Compression.none ")
SET = "process_set=hvd.global_process_set"
SCATTERED = f"op=hvd.Average {SET} prescale_factor=1.0 postscale_factor=1.0"
QUERIES = (
    "shutdown is_initialized rank size local_rank local_size cross_rank cross_size stop_timeline "
    "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built "
    "rocm_built"
)
# A word is an argument, "a=b" one with the default that b evaluates to.
SIGNATURES = {
    "init": "comm=None process_sets=None",
    "start_timeline": "file_path mark_cycles=False",
    **dict.fromkeys(QUERIES.split(), ""),
    "allreduce": f"tensor {COMPRESSED}",
    "allreduce_": f"tensor {ALLREDUCE}",
    "allreduce_async": f"tensor {ALLREDUCE}",
    "allreduce_async_": f"tensor {ALLREDUCE}",
    "grouped_allreduce": f"tensors {COMPRESSED}",
    "grouped_allreduce_": f"tensors {ALLREDUCE}",
    "grouped_allreduce_async": f"tensors {ALLREDUCE}",
    "grouped_allreduce_async_": f"tensors {ALLREDUCE}",
    "sparse_allreduce_async": f"tensor name op {SET}",
    "allgather": f"tensor name=None {SET}",
    "allgather_async": f"tensor name=None {SET}",
    "grouped_allgather": f"tensors name=None {SET}",
    "grouped_allgather_async": f"tensors name=None {SET}",
    **dict.fromkeys(
        ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"],
        f"tensor root_rank name=None {SET}",
    ),
    "alltoall": f"tensor splits=None name=None {SET}",
    "alltoall_async": f"tensor splits=None name=None {SET}",
    "reducescatter": f"tensor name=None compression=hvd.Compression.none {SCATTERED}",
    "reducescatter_async": f"tensor name=None {SCATTERED}",
    "grouped_reducescatter": f"tensors name=None compression=hvd.Compression.none {SCATTERED}",
    "grouped_reducescatter_async": f"tensors name=None {SCATTERED}",
    "join": "device=-1",
    "barrier": SET,
    "poll": "handle",
    "synchronize": "handle",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "DistributedOptimizer": "optimizer named_parameters=None compression=hvd.Compression.none "
    "backward_passes_per_step=1 op=hvd.Average gradient_predivide_factor=1.0 num_groups=0 groups=None "
    f"sparse_as_dense=False {SET}",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_object": f"obj root_rank=0 name=None {SET}",
    "allgather_object": "obj name=None",
    "SyncBatchNorm": "num_features eps=1e-5 momentum=0.1 affine=True track_running_stats=True",
    "elastic.run": "func",
    "elastic.TorchState": "model=None optimizer=None **kwargs",
    "elastic.ElasticSampler": "dataset shuffle=True seed=0",
    "elastic.ElasticSampler.set_epoch": "self epoch",
    "elastic.ElasticSampler.record_batch": "self batch_idx batch_size",
}
OTHERS = "Average Sum Adasum Min Max Product Compression HorovodInternalError global_process_set elastic"
# Modules of Horovod that scripts import from, and names that they find there.
MODULES = {
    "common.basics": "",
    "common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError",
    "common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "common.elastic": "State ObjectState run_fn",
    "torch.mpi_ops": "is_homogeneous "
    + " ".join(name for name in SIGNATURES if name in ("init", "allreduce_", "join", "rank")),
    "torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "torch.optimizer": "DistributedOptimizer",
    "torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "torch.sync_batch_norm": "SyncBatchNorm",
    "torch.elastic": "TorchState ElasticSampler run",
    "torch.elastic.state": "TorchState get_handler_registry set_handler_registry",
    "torch.elastic.sampler": "ElasticSampler",
    "common.util": "EXTENSIONS extension_available check_extension gpu_available mpi_built gloo_built nccl_built "
    "ddl_built ccl_built env split_list num_rank_is_power_2 is_iterable",
    "runner": "run",
    "runner.util.threads": "in_thread",
}
RUN = "func args=() kwargs=None num_proc=1 min_num_proc=None max_num_proc=None"
RUN_KEYWORDS = (
    "hosts hostfile start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi "
    "mpi_args network_interface executable np reset_limit"
)


def attribute(dotted: str):
    found = hvd
    for part in dotted.split("."):
        found = getattr(found, part)
    return found


def check_signature(function, text: str) -> None:
    given = list(inspect.signature(function).parameters.values())
    for index, word in enumerate(text.split()):
        wanted, _, default = word.partition("=")
        assert index < len(given), f"takes no {wanted}"
        kind = (
            inspect.Parameter.VAR_KEYWORD if wanted[:2] == "**" else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        assert (given[index].name, given[index].kind) == (wanted.lstrip("*"), kind)
        if default:
            assert given[index].default == eval(default)
        else:
            assert given[index].default is NO_DEFAULT
    more = [parameter for parameter in given[len(text.split()) :] if parameter.default is NO_DEFAULT]
    assert more == [], "what is new must be optional"


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_name_of_horovod_torch_takes_its_arguments_in_its_order(name) -> None:
    check_signature(attribute(name), SIGNATURES[name])


def test_horovod_run_takes_its_arguments_in_its_order() -> None:
    check_signature(horovod.run, RUN)
    assert {*RUN_KEYWORDS.split()} < {*inspect.signature(horovod.run).parameters}


def test_reductions_have_horovods_numbers_and_no_public_name_is_missing() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [*range(6)]
    assert {name for name in SIGNATURES if "." not in name} | {*OTHERS.split()} == {*hvd.__all__}
    assert {"none", "fp16"} < {*vars(hvd.Compression)}
    assert issubclass(HorovodInternalError, RuntimeError)


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_scripts_import_from_have_their_names(module) -> None:
    found = importlib.import_module(f"gossamer.horovod.{module}")
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


def test_the_version_is_that_of_the_names() -> None:
    assert horovod.__version__ == "0.28.1"


def test_the_helpers_answer_as_the_queries_do(capsys) -> None:
    for what in ("mpi", "gloo", "nccl", "ddl", "ccl"):
        assert getattr(util, f"{what}_built")() == getattr(hvd, f"{what}_built")()
    assert capsys.readouterr().out == ""
    assert [util.extension_available(name, verbose=True) for name in util.EXTENSIONS] == [False, True, False]
    assert "Extension torch was built." in capsys.readouterr().out
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod.tensorflow is not there"):
        util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")
    assert not util.gpu_available("mxnet")
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert [count for count in range(9) if util.num_rank_is_power_2(count)] == [1, 2, 4, 8]
    assert util.is_iterable([])
    assert not util.is_iterable(1)


def test_env_sets_variables_for_a_while(monkeypatch) -> None:
    monkeypatch.setenv("HVD_TEST_THERE", "old")
    with util.env(HVD_TEST_THERE="new", HVD_TEST_NEW="1", HVD_TEST_NOT=None):
        found = [os.environ.get(f"HVD_TEST_{name}") for name in ("THERE", "NEW", "NOT")]
    assert found == ["new", "1", None]
    assert [os.environ.get(f"HVD_TEST_{name}") for name in ("THERE", "NEW")] == ["old", None]


def test_in_thread_calls_a_function_in_a_thread_of_its_own() -> None:
    got = []
    in_thread(lambda *args: got.append((threading.current_thread().name, args)), (1, 2), name="mine").join()
    assert got == [("mine", (1, 2))]
    assert in_thread(list).daemon
    with pytest.raises(ValueError, match=r"args must be a tuple, got 3"):
        in_thread(print, 3)


def test_in_thread_drops_an_error_only_if_it_is_asked_to(monkeypatch) -> None:
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    in_thread(lambda: 1 / 0, silent=True).join()
    assert told == []
    in_thread(lambda: 1 / 0).join()
    assert told == [ZeroDivisionError]


def test_the_page_names_everything_public() -> None:
    names = [name.rpartition(".")[2] for name in SIGNATURES] + OTHERS.split()
    variables = [*environment.EFFECTIVE, *environment.WITHOUT_EFFECT, *environment.ELSEWHERE]
    assert [name for name in names if f"`{name}" not in PAGE and f".{name}" not in PAGE] == []
    assert [name for name in variables if f"`{name}`" not in PAGE] == []
