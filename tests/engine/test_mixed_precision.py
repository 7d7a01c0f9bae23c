"""autocast and GradScaler under gs.DataParallel: the same training as one process's, and ranks that skip together."""

import json

import pytest
import torch

from gossamer.algorithms import ALGORITHMS
from tests.engine.mixed_precision import FIRST_SCALE, HALF, alone, scaled
from tests.support.gpu import needs_gpu
from tests.support.models import relative_error
from tests.support.ranks import run_job, run_ranks

IN_LOCKSTEP = sorted(set(ALGORITHMS) - {"async"})  # the ranks of async skip independently


@pytest.mark.parametrize(("algorithm", "error"), [("gradient_allreduce", 1e-6), ("bytegrad", 0.02)])
def test_under_autocast_ranks_train_as_one_process_does(algorithm, error) -> None:
    expected = alone(2)
    for rank in run_ranks(2, lambda comm: scaled(comm, algorithm=algorithm, scale=None)):
        assert rank["in"] == {HALF["cpu"]}
        assert relative_error(rank["weights"], expected) < error


@pytest.mark.parametrize(
    ("algorithm", "optimizers"),
    [("gradient_allreduce", "torch.optim"), ("gradient_allreduce", "fused"), ("bytegrad", "gs.optim"), ("qadam", "")],
)  # fmt: skip
def test_a_scale_that_is_a_power_of_two_leaves_no_trace(algorithm, optimizers) -> None:
    def train(scale):
        return run_ranks(
            2, lambda comm: scaled(comm, algorithm=algorithm, optimizers=optimizers, scale=scale)
        )

    for mine, plain in zip(train(FIRST_SCALE), train(None), strict=True):
        assert mine["scales"][-1] > FIRST_SCALE
        assert torch.equal(mine["weights"], plain["weights"])


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize(
    ("algorithm", "optimizers"),
    [(name, "torch.optim") for name in IN_LOCKSTEP]
    + [("gradient_allreduce", "gs.optim"), ("gradient_allreduce", "fused")],
)
def test_an_inf_in_one_ranks_gradient_makes_all_skip_that_step_and_halve_their_scale(
    algorithm, optimizers, step
) -> None:
    ranks = run_ranks(3, lambda comm: scaled(comm, algorithm=algorithm, optimizers=optimizers, bad=(1, step)))
    for rank in ranks:
        assert rank["scales"] == ranks[0]["scales"]
        assert rank["moved"] == [index != step for index in range(8)]
        assert rank["weights"].isfinite().all()
        assert torch.equal(rank["weights"], ranks[0]["weights"])
    before = ranks[0]["scales"][step - 1]
    assert ranks[0]["scales"][step] == before / 2


JOB = """
import json
import sys
from types import SimpleNamespace

import torch

import gossamer as gs

device = sys.argv[1]
from tests.engine.mixed_precision import HALF, alone, scaled

gs.init(backend="gloo")
rank = SimpleNamespace(rank=gs.rank(), size=gs.size())

def train(**options):
    # What both ranks saw, and whether their weights are equal.
    mine = scaled(rank, device=device, **options)
    both = gs.all_gather(mine["weights"][None])
    seen = gs.all_gather(torch.tensor([mine["scales"] + mine["moved"]], dtype=torch.float64))
    equal = torch.equal(both[0], both[1]) and torch.equal(seen[0], seen[1])
    half = mine["in"] == {HALF[torch.device(device).type]}
    return mine, {"equal": equal, "half": half, "moved": mine["moved"], "scales": mine["scales"]}

def error(mine, reference):
    return ((mine["weights"] - reference).norm() / reference.norm()).item()

report = {}
expected = alone(2, device=device)
for name, options in {
    "exact": {},
    "rounded": {"algorithm": "bytegrad"},
    "traced": {"compiler": "aot_eager"},
    "compiled": {"compiler": "inductor"},
}.items():
    mine, seen = train(**options)
    report[name] = seen | {"error": error(mine, expected)}
for algorithm in ("gradient_allreduce", "bytegrad", "qadam", "decentralized"):
    _, report[f"inf in {algorithm}"] = train(algorithm=algorithm, bad=(1, 5))
if gs.rank() == 0:
    print(json.dumps(report))
gs.shutdown()
"""


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_ranks_train_under_fp16_as_one_process_does_also_compiled_and_skip_together(
    tmp_path,
) -> None:
    report = json.loads(run_job(JOB, 2, tmp_path, "cuda:0").splitlines()[-1])
    assert all(seen["equal"] and seen["half"] for seen in report.values()), report
    # Half precision: a compiled kernel keeps intermediate values in float32 that the others round.
    bounds = {"exact": 1e-6, "traced": 1e-3, "compiled": 1e-3, "rounded": 0.02}
    errors = {name: report[name]["error"] for name in bounds}
    assert all(errors[name] < bound for name, bound in bounds.items()), errors
    skipped = [seen for name, seen in report.items() if name.startswith("inf")]
    for seen in skipped:
        assert seen["moved"] == [index != 5 for index in range(8)], report
        assert seen["scales"][5] == seen["scales"][4] / 2, report
