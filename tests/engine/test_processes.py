"""Real processes with torch's default group: gs.init, private groups, subgroups, several models.

The tests run in a job of three processes. One stays a script: that processes end well with their models left open is
what it shows.
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossamer as gs
from tests.support.forks import fork_job
from tests.support.jobs import Job

PAIRS = [[0, 1], [2]]


@pytest.fixture(scope="module")
def job():
    with Job(3) as job, job.within(gs.init, gs.shutdown):
        yield job


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(wrapped, optimizer, steps=5):
    generator = torch.Generator().manual_seed(gs.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(6, 8, generator=generator)).square().mean().backward()
        # the user's own collective on the default group, while the model has its private one
        dist.all_reduce(torch.ones(1))
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in wrapped.parameters()])


def equal_on(weights, group, ranks):
    every = [torch.empty_like(weights) for _ in ranks]
    dist.all_gather(every, weights, group=group)
    return all(torch.equal(every[0], other) for other in every)


def wrap_where_ranks_hold_different_numbers_of_groups():
    """Returns the wrapped model, trained. With tensor parallelism ranks hold different numbers of groups."""
    dist.new_group([0])
    inner = network(gs.rank())
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    wrapped = gs.DataParallel(inner, optimizer, algorithm="bytegrad")
    assert equal_on(train(wrapped, optimizer), None, range(gs.size()))
    return wrapped


def wrap_on_a_subgroup():
    """Returns the wrapped model, trained with the ranks of its subgroup, its optimizer, and what wraps it again."""
    groups = [dist.new_group(pair) for pair in PAIRS]
    mine = next(i for i, pair in enumerate(PAIRS) if gs.rank() in pair)
    inner = network(10 + gs.rank())
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)

    def wrap():
        return gs.DataParallel(inner, optimizer, process_group=groups[mine])

    wrapped = wrap()
    weights = train(wrapped, optimizer)
    assert equal_on(weights, groups[mine], PAIRS[mine])
    assert not equal_on(weights, None, range(gs.size()))
    assert gs.all_reduce(torch.ones(3), group=groups[mine]).tolist() == [len(PAIRS[mine])] * 3
    return wrapped, optimizer, wrap


def train_side_by_side():
    """Returns two models, which both train. The second is wrapped three times more, with new private groups."""
    first = wrap_where_ranks_hold_different_numbers_of_groups()
    second, optimizer, wrap = wrap_on_a_subgroup()
    for _ in range(3):
        second.close()
        second = wrap()
        train(second, optimizer, steps=1)
    return first, second


@pytest.mark.usefixtures("job")
def test_ranks_that_hold_different_numbers_of_groups_wrap():
    wrap_where_ranks_hold_different_numbers_of_groups().close()


@pytest.mark.usefixtures("job")
def test_a_model_on_a_subgroup_trains_with_its_ranks_alone():
    wrap_on_a_subgroup()[0].close()


@pytest.mark.usefixtures("job")
def test_models_on_default_group_and_subgroups_train_side_by_side():
    for model in train_side_by_side():
        model.close()


LEFT_OPEN = """
import gossamer as gs
from tests.engine.test_processes import train_side_by_side

gs.init()
models = train_side_by_side()
if gs.rank() == 0:
    print("all claims hold")
"""


def test_processes_end_well_with_models_left_open(tmp_path):
    assert "all claims hold" in fork_job(LEFT_OPEN, 3, tmp_path)


def test_import_costs_little_beside_torch():
    code = (
        "import sys, torch; before = set(sys.modules); import gossamer; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True
    )
    loaded = done.stdout.split()
    assert not [name for name in loaded if name.split(".")[0] in ("rich", "matplotlib", "mpi4py")]
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch.distributed.tensor"))]
