# Every file of examples/ runs as its own first lines say, with two workers.

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def run_example(start):
    """``run_example("train.py")`` runs it with two workers and returns what they printed."""

    def run(name: str) -> str:
        argv = ["-m", "gossamer.launch.cli", "run", "-np", "2", str(EXAMPLES / name)]
        code, out, errors = start(argv).finish()
        assert code == 0, errors
        return out

    return run


def test_every_example_has_a_test_here() -> None:
    tested = set(re.findall(r"run_example\(\"(\w+\.py)\"\)", Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_train_lowers_the_loss(run_example) -> None:
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", run_example("train.py"))]
    assert len(losses) == 5, "rank 0 alone reports"
    assert losses[-1] < losses[0] / 2


def test_all_reduce_rounds_little_and_alike_on_all_ranks(run_example) -> None:
    found = re.findall(r"rank (\d)/2: .* mean ([\d.]+)%, first value (\S+)", run_example("all_reduce.py"))
    assert sorted(rank for rank, _, _ in found) == ["0", "1"]
    assert len({(error, value) for _, error, value in found}) == 1
    assert float(found[0][1]) < 1.5


def test_accelerate_lowers_the_loss_with_accumulation(run_example) -> None:
    pytest.importorskip("accelerate")
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", run_example("accelerate_training.py"))]
    assert len(losses) == 10, "rank 0 alone reports"
    assert losses[-1] < losses[0] / 4


def test_the_hugging_face_trainer_lowers_the_loss(run_example) -> None:
    pytest.importorskip("transformers")
    losses = [float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", run_example("hf_trainer.py"))]
    assert len(losses) == 5, "rank 0 alone reports"
    assert losses[-1] < losses[0] / 2
