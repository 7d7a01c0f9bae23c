# DistributedOptimizer where sessions end and workers die. What one session shows: test_steps.py, test_graphs.py,
# test_misuse.py, test_state.py.


import pytest

from tests.support.forks import fork_job

AGAIN = """
import warnings
import torch, gossamer.horovod.torch as hvd
from torch import nn
from gossamer.horovod.torch.compression import NoneCompressor

class Own(NoneCompressor):
    pass

torch.manual_seed(0)
models = [nn.Linear(4, 3), nn.Linear(4, 3)]
models[1].load_state_dict(models[0].state_dict())
alone = nn.Linear(4, 3)
alone.load_state_dict(models[0].state_dict())
layer = hvd.SyncBatchNorm(4)
hvd.init()
optimizers = [
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=way)
    for model, way in zip(models, (hvd.Compression.none, Own))
]
reference = torch.optim.SGD(alone.parameters(), 0.1)
batch = torch.arange(16.0).view(4, 4) / 16
for session in range(5):
    hvd.init()
    mine = batch[2 * hvd.rank():][:2] if hvd.size() == 2 else batch
    for step in range(2):
        layer(mine)
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(mine).square().mean().backward()
            optimizer.step()
        reference.zero_grad()
        alone(batch).square().mean().backward()
        reference.step()
    if hvd.size() == 2:
        assert [each.report()["way"] for each in optimizers] == ["engine", "negotiated"]
        models[0](mine).sum().backward()  # gradients are under way when the session ends
        models[1](mine).sum().backward()
        hvd.barrier()
        torch.testing.assert_close(models[0].weight, alone.weight)
        torch.testing.assert_close(models[1].weight, alone.weight)
    hvd.shutdown()
    try:
        optimizers[0].step()
        raise SystemExit("no error")
    except hvd.HorovodInternalError as error:
        assert "not been initialized" in str(error), error
    for optimizer in optimizers:
        optimizer.zero_grad()
print("is done")
"""


def test_an_optimizer_outlives_shutdown_and_goes_on_after_init(tmp_path) -> None:
    assert fork_job(AGAIN, 2, tmp_path).count("is done") == 2


def test_one_process_alone_steps_as_without_it(fork) -> None:
    code, out, err = fork(["-c", AGAIN]).finish()
    assert code == 0, err
    assert "is done" in out


KILLED = """
import os, signal, sys, time
import torch, gossamer.horovod.torch as hvd
from torch import nn
from gossamer.horovod.torch.compression import NoneCompressor

class Own(NoneCompressor):
    pass

hvd.init(backend=sys.argv[1])
model = nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])
way = hvd.Compression.none if sys.argv[2] == "engine" else Own
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), compression=way)
x = torch.ones(2, 20)
for step in range(3):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
assert optimizer.report()["way"] == sys.argv[2]
print("ready", flush=True)
if hvd.rank() == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
optimizer.zero_grad()
model(x).sum().backward()
begun = time.monotonic()
for _ in range(2):  # and again: nothing works any more, nothing hangs
    try:
        optimizer.synchronize()
        raise SystemExit("no error")
    except hvd.HorovodInternalError as error:
        assert "rank 1" in str(error) or "ended" in str(error), error
assert time.monotonic() - begun < 20
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
print("noticed", flush=True)
open(f"noticed.{hvd.rank()}", "w").close()
while not os.path.exists("noticed.2"):  # rank 0 hosts the store, in which the other looks for a reason
    assert time.monotonic() - begun < 20
    time.sleep(0.02)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("operations", "way"), [("gossamer", "engine"), ("gloo", "negotiated"), ("gloo", "engine")]
)
def test_a_rank_that_is_killed_is_an_internal_error_of_the_others(fork, free_port, operations, way) -> None:
    place = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port),
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        fork(["-c", KILLED, operations, way], env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(3)
    ]
    ends = [rank.finish() for rank in ranks]
    assert [code for code, _, _ in ends] == [0, -9, 0], [err for _, _, err in ends]
    assert all("noticed" in out for code, out, _ in ends if code == 0)
