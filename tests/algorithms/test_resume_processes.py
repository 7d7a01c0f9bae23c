"""For every algorithm, a run that other processes resume has the bits of an uninterrupted run.

The processes of one job train whole runs and first parts, and end. The processes of another job train the second parts.
"""

from pathlib import Path

import pytest
import torch

import gossamer as gs
from tests.support.jobs import Job

WHOLE, FIRST, SECOND = range(10), range(6), range(6, 10)
ALGORITHMS = {
    "gradient_allreduce": gs.GradientAllReduce,
    "bytegrad": gs.ByteGrad,
    "decentralized": gs.Decentralized,
    "low_precision_decentralized": gs.LowPrecisionDecentralized,
    "qadam": gs.QAdam,
    "powersgd": lambda: gs.PowerSGD(1, min_compression_rate=1.0),
    "local_sgd": lambda: gs.LocalSGD(4),
    "zero_one_adam": lambda: gs.ZeroOneAdam(double_every=1, longest=4),
    "few bits": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4(stochastic=True))),
    "one bit": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.OneBit())),
    "by rows": lambda: gs.ByteGrad(codec=gs.MinMaxUInt8()),
}
ADAMS = {"qadam": gs.QAdamOptimizer, "zero_one_adam": gs.ZeroOneAdamOptimizer}


def train(name, steps, saved=None):
    """The state after these steps, of a new run or of one that goes on from `saved`."""
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(10, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    params = module.parameters()
    optimizer = ADAMS[name](params, 0.01, 3) if name in ADAMS else torch.optim.SGD(params, 0.1, momentum=0.9)
    algorithm, broadcast = ALGORITHMS[name](), saved is None
    model = gs.DataParallel(module, optimizer, algorithm=algorithm, broadcast=broadcast, bucket_bytes=1000)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        model.load_algorithm_state_dict(saved["algorithm"])
    for step in steps:
        inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + gs.rank()))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["algorithm"] = model.algorithm_state_dict()
    model.close()
    return state


def own_file(folder: Path, name):
    return folder / f"{name} of rank {gs.rank()}.pt"


def train_until_the_end(folder):
    for name in ALGORITHMS:
        torch.save([train(name, WHOLE)["model"], train(name, FIRST)], own_file(folder, name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the ranks of the first job have saved."""
    folder = tmp_path_factory.mktemp("runs")
    with Job(2) as job, job.within(gs.init, gs.shutdown, backend="gossamer"):
        job.run(train_until_the_end, {"folder": folder})
    return folder


@pytest.fixture(scope="module")
def other_processes(folder):
    with Job(2) as job, job.within(gs.init, gs.shutdown, backend="gossamer"):
        yield job


@pytest.mark.usefixtures("other_processes")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_other_processes_go_on_where_the_first_ones_ended(folder, name):
    whole, saved = torch.load(own_file(folder, name))
    resumed = train(name, SECOND, saved)["model"]
    assert resumed.keys() == whole.keys()
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []
