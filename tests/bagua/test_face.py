# gossamer.bagua: what an import gives and does not touch, ranks and sizes, joining, checkpoints. One process each.

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossamer as gs
import gossamer.bagua.torch_api as bagua
from gossamer.bagua.torch_api import env
from gossamer.bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint

# Names of bagua.torch_api that need no algorithm.
NAMES = """
init_process_group is_initialized new_group from_torch_group BaguaProcessGroup ReduceOp send recv broadcast
broadcast_coalesced broadcast_object allreduce allreduce_inplace allreduce_coalesced_inplace reduce reduce_inplace
allgather allgather_inplace gather gather_inplace scatter scatter_inplace reduce_scatter reduce_scatter_inplace
alltoall alltoall_inplace alltoall_v alltoall_v_inplace barrier get_rank get_world_size get_local_rank
get_local_size communication env contrib checkpoint BaguaTensor
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("GROUP_RANK", "NODE_RANK", "BAGUA_DEFAULT_BUCKET_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    gs.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_names_are_where_bagua_had_them() -> None:
    assert [name for name in NAMES.split() if not hasattr(bagua, name)] == []
    for path in (
        "communication:ReduceOp CommMember BaguaProcessGroup init_process_group new_group from_torch_group",
        "env:get_rank get_world_size get_local_rank get_local_size get_node_rank get_default_bucket_size "
        "find_free_network_port get_master_addr",
        "contrib:fuse_optimizer CacheLoader CachedDataset LoadBalancingDistributedSampler "
        "LoadBalancingDistributedBatchSampler",
        "contrib.fuse.optimizer:fuse_optimizer fuse_step is_fused_optimizer",
        "contrib.cache_loader:CacheLoader",
        "contrib.cached_dataset:CachedDataset",
        "contrib.load_balancing_data_loader:LoadBalancingDistributedSampler",
        "contrib.sync_batchnorm:SyncBatchNorm",
        "contrib.utils.store:Store ClusterStore",
        "contrib.utils.redis_store:RedisStore",
        "checkpoint:save_checkpoint load_checkpoint",
        "tensor:BaguaTensor",
        "algorithms.gradient_allreduce:GradientAllReduceAlgorithm GradientAllReduce",
    ):
        module, _, names = path.partition(":")
        exec(f"from gossamer.bagua.torch_api.{module} import {names.replace(' ', ', ')}")


def test_reduce_op_has_bagua_numbers() -> None:
    assert {op.name: int(op) for op in bagua.ReduceOp} == {
        "SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BOR": 7, "BAND": 8, "BXOR": 9, "AVG": 10,
    }  # fmt: skip


def test_import_patches_nothing_and_starts_nothing() -> None:
    code = """
import socket, threading, torch, torch.distributed as dist, torch.utils.data
import gossamer
def attributes():
    classes = [torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.optim.SGD, dist.ProcessGroup]
    return {(kind.__name__, name): id(value) for kind in classes for name, value in vars(kind).items()}
opened = []
socket.socket.bind = socket.socket.listen = lambda *a: opened.append(a)
before, threads = attributes(), threading.active_count()
import gossamer.bagua.torch_api
from gossamer.bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm
import sys
assert attributes() == before
assert (threading.active_count(), opened) == (threads, [])
assert "redis" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr


def test_places_come_from_the_environment_before_joining(monkeypatch) -> None:
    def places() -> tuple[int, ...]:
        local = bagua.get_local_rank(), bagua.get_local_size()
        return (bagua.get_rank(), bagua.get_world_size(), *local, env.get_node_rank())

    assert places() == (0, 1, 0, 1, 0)
    variables = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "GROUP_RANK": 1}
    for name, value in ({"MASTER_ADDR": "host7", "MASTER_PORT": 1} | variables).items():
        monkeypatch.setenv(name, str(value))
    assert places() == (5, 8, 1, 4, 1)
    assert env.get_master_addr() == "host7"
    monkeypatch.delenv("GROUP_RANK")
    assert env.get_node_rank() == 0
    monkeypatch.setenv("NODE_RANK", "3")
    assert env.get_node_rank() == 3
    monkeypatch.setenv("NODE_RANK", "last")
    with pytest.raises(gs.ConfigError, match="NODE_RANK must be an integer, got 'last'"):
        env.get_node_rank()
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(gs.ConfigError, match="below its size, got 8 of 8"):
        bagua.get_rank()


def test_bucket_size_address_and_port(monkeypatch) -> None:
    assert env.get_default_bucket_size() == 10 * 1024**2
    assert env.get_master_addr() == "127.0.0.1"
    assert 1024 <= env.find_free_network_port() < 65536
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "4096")
    assert env.get_default_bucket_size() == 4096
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "0")
    with pytest.raises(gs.ConfigError, match="BAGUA_DEFAULT_BUCKET_SIZE must be at least 1 byte, got '0'"):
        env.get_default_bucket_size()


def test_autotune_is_asked_for_by_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("BAGUA_AUTOTUNE", raising=False)
    assert env.get_autotune() is False
    for text, wanted in {"0": False, "1": True, "2": True}.items():
        monkeypatch.setenv("BAGUA_AUTOTUNE", text)
        assert env.get_autotune() is wanted
    monkeypatch.setenv("BAGUA_AUTOTUNE", "yes")
    with pytest.raises(gs.ConfigError, match="BAGUA_AUTOTUNE must be an integer from 0, got 'yes'"):
        env.get_autotune()


def test_joining_alone_once_and_again_after_shutdown() -> None:
    for call in (bagua.new_group, bagua.barrier, lambda: bagua.broadcast(torch.ones(1))):
        with pytest.raises(gs.ConfigError, match=r"call init_process_group\(\) first"):
            call()
    before = dict(os.environ)
    bagua.init_process_group()
    assert dict(os.environ) == before
    assert bagua.is_initialized()
    got = torch.ones(2)
    bagua.allreduce_inplace(got)
    assert got.tolist() == [1.0, 1.0]
    with pytest.raises(gs.ConfigError, match="must be called once, but this process is already rank 0 of 1"):
        bagua.init_process_group()
    gs.shutdown()
    assert not bagua.is_initialized()
    gs.init()
    assert not bagua.is_initialized()  # the group under Bagua's group is gone
    bagua.init_process_group()
    bagua.barrier()


def test_group_of_torch_is_adopted() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bagua.init_process_group()
    assert bagua.new_group().torch_group is not None
    assert dist.get_backend() == "gloo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank and sizes are for a store, got .*'rank': 0"),
        ({"store": True}, "a store needs rank, world_size and local_world_size"),
        ({"store": True, "rank": 0, "world_size": 1}, "'local_world_size': -1"),
        (
            {"store": True, "rank": 1, "world_size": 1, "local_world_size": 1},
            "0 <= rank < size .*got rank=1, size=1",
        ),
        ({"store": True, "rank": 0, "world_size": 1, "local_world_size": 2}, "local_size=2"),
        ({"store": True, "rank": 0, "world_size": 1, "local_world_size": 0}, "local_size=0"),
    ],
)
def test_incomplete_or_impossible_places_are_refused(arguments, message) -> None:
    if "store" in arguments:
        arguments = {**arguments, "store": dist.HashStore()}
    with pytest.raises(gs.ConfigError, match=message):
        bagua.init_process_group(**arguments)
    assert not dist.is_initialized()


def test_store_beside_a_group_of_torch_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(gs.ConfigError, match="torch.distributed is initialised already; call gossamer.init"):
        bagua.init_process_group(dist.HashStore(), 0, 1, 1)


def model_optimizer_and_scheduler() -> tuple:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_checkpoint_comes_back_bit_for_bit_from_bagua_files(tmp_path) -> None:
    model, optimizer, scheduler = model_optimizer_and_scheduler()
    save_checkpoint(3, tmp_path, nn.Linear(3, 2))
    save_checkpoint(12, tmp_path, model, optimizer, scheduler)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    files = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*"))
    assert files == [
        "iter_0000003/mp_rank_00_model_states.pt",
        "iter_0000012/mp_rank_00_model_states.pt",
        "latest_checkpointed_iteration.txt",
    ]
    other, other_optimizer, other_scheduler = model_optimizer_and_scheduler()
    nn.init.zeros_(other.weight)
    other_optimizer.zero_grad()
    assert load_checkpoint(str(tmp_path), other, other_optimizer, other_scheduler) == 12
    assert torch.equal(other.weight, model.weight)
    assert other_scheduler.state_dict() == scheduler.state_dict()
    for mine, theirs in zip(
        other_optimizer.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_strict_is_forwarded(tmp_path) -> None:
    save_checkpoint(1, tmp_path, nn.Linear(3, 2, bias=False))
    with pytest.raises(RuntimeError, match="Missing key"):
        load_checkpoint(tmp_path, nn.Linear(3, 2))
    assert load_checkpoint(tmp_path, nn.Linear(3, 2), strict=False) == 1


def test_missing_and_damaged_checkpoints(tmp_path, caplog) -> None:
    model = nn.Linear(3, 2)
    assert load_checkpoint(tmp_path, model) == 0
    assert "starting at 0" in caplog.text
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(gs.ConfigError, match="must hold the number of an iteration, got 'release'"):
        load_checkpoint(tmp_path, model)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    with pytest.raises(gs.ConfigError, match="names iteration 7, but there is no .*iter_0000007"):
        load_checkpoint(tmp_path, model)
    save_checkpoint(8, tmp_path, model)
    with pytest.raises(gs.ConfigError, match=r"holds \['iteration', 'model'\], but no optimizer"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))


class Schedule:
    def state_dict(self) -> dict:
        return {"function": Schedule}

    def load_state_dict(self, state: dict) -> None:
        self.loaded = state["function"]


def test_objects_in_a_checkpoint_are_loaded_only_on_request(tmp_path) -> None:
    model = nn.Linear(3, 2)
    save_checkpoint(1, tmp_path, model, lr_scheduler=Schedule())
    with pytest.raises(gs.ConfigError, match="pass weights_only=False"):
        load_checkpoint(tmp_path, model, lr_scheduler=Schedule())
    schedule = Schedule()
    load_checkpoint(tmp_path, model, lr_scheduler=schedule, weights_only=False)
    assert schedule.loaded is Schedule


def test_checkpoint_that_cannot_be_written_is_an_error(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(gs.GossamerError, match="rank 0 could not write .*file"):
        save_checkpoint(1, tmp_path / "file", nn.Linear(3, 2))
