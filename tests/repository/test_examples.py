# Every file of examples/ runs with two workers, by the command in its first lines.

import re
from pathlib import Path

import pytest

from tests import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run_example(fork):
    """``run_example("train.py")`` runs it with two workers and returns what they printed."""

    def run(name: str, *arguments: str) -> str:
        argv = ["-m", "gossamer.launch.cli", "run", "-np", "2", str(EXAMPLES / name), *arguments]
        code, out, errors = fork(argv).finish()
        assert code == 0, errors
        return out

    return run


def test_every_example_has_a_test_here() -> None:
    tested = set(re.findall(r"run_example\(\"(\w+\.py)\"[,)]", Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_train_lowers_the_loss(run_example) -> None:
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", run_example("train.py"))]
    assert len(losses) == 5, "rank 0 alone reports"
    assert losses[-1] < losses[0] / 2


def test_tensorboard_gets_the_loss_and_the_figures_of_the_steps(run_example, tmp_path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = run_example("train_tensorboard.py", "--logdir", str(tmp_path))
    events = reading.EventAccumulator(str(tmp_path)).Reload()
    shown = {f"gossamer/{name}" for name in ("step_ms", "exposed_ms", "communication_ms", "bytes_out")}
    assert shown | {"loss"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("gossamer/step_ms")] == [50, 100, 150, 200]
    losses = [event.value for event in events.Scalars("loss")]
    assert losses[-1] < losses[0]
    assert len(re.findall(r"step \d+: loss", out)) == 4, "rank 0 alone reports"


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


@pytest.mark.parametrize(
    "arguments", [[], ["--use-adasum", "--compression", "fp16"]], ids=["average", "adasum"]
)
def test_horovods_digits_are_recognised(run_example, arguments) -> None:
    pytest.importorskip("sklearn")
    found = re.findall(
        r"epoch \d: loss ([\d.]+), accuracy ([\d.]+)",
        run_example("horovod_digits.py", "--epochs", "3", *arguments),
    )
    assert len(found) == 3, "rank 0 alone reports"
    assert float(found[-1][0]) < float(found[0][0]) / 2
    assert float(found[-1][1]) > 0.8
