"""`gossamer bench network`: a tiny run, its bytes against the kernel's, its refusals; and how the study judges.

Tests that need hosts are skipped where there can be none; test_netlab.py tests the lab itself.
"""

import json
import os
import subprocess

import pytest

from gossamer import netlab
from gossamer.netlab.comparison.lines import of_steps
from tests import ROOT
from tests.support import quick_python

unavailable = netlab.missing()
needs_hosts = pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")


def run_command(algorithms: str, *flags: str) -> tuple[list[dict], str]:
    """The lines of a tiny run of the command between two hosts, and its output."""
    command = [quick_python.program(), "-m", "gossamer.launch.cli", "bench", "network", "--hosts", "2"]
    command += [
        "--rate",
        "1gbit",
        "--model",
        "cnn",
        "--steps",
        "2",
        "--rows",
        "1",
        "--algorithms",
        algorithms,
        *flags,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """The lines of a run with three variants, the folder that it wrote, and its output."""
    folder = tmp_path_factory.mktemp("network")
    lines, shown = run_command("ddp,bytegrad,local_sgd", "--output", str(folder))
    return lines, folder, shown


@needs_hosts
def test_gossamers_bytes_are_those_of_the_kernel_within_5_percent(quick_run) -> None:
    lines = {line["algorithm"]: line for line in quick_run[0]}
    for name in ("bytegrad", "local_sgd"):
        assert abs(lines[name]["bytes_difference"]) < 0.05, lines[name]
    assert lines["ddp"]["bytes_per_step"] is None
    exact = 4 * lines["ddp"]["parameters"]  # 2 (n-1)/n of it for each of two ranks
    assert lines["ddp"]["payload_by_kernel"] == pytest.approx(exact, rel=0.05)


@needs_hosts
def test_the_command_writes_a_line_a_variant_a_table_and_a_picture(quick_run) -> None:
    lines, folder, shown = quick_run
    assert [line["algorithm"] for line in lines] == ["ddp", "bytegrad", "local_sgd"]
    for line in lines:
        assert (line["hosts"], line["ranks_per_host"], line["rate"], line["model"]) == (
            2,
            1,
            "1gbit",
            "cnn",
        )
        assert line["step_ms"] > 0
        assert line["compute_ms"] > 0
        sent = line["bytes_per_step"] or line["payload_by_kernel"]
        assert line["byte_limit_ms"] == pytest.approx(1e3 * sent / 125e6, rel=1e-3)
        assert line["step_over_limit"] == pytest.approx(line["step_ms"] / line["byte_limit_ms"], rel=1e-3)
        allowed_ms = 1.15 * line["byte_limit_ms"] + line["compute_ms"]
        assert line["step_over_allowed"] == pytest.approx(line["step_ms"] / allowed_ms, rel=1e-3)
        share = line["payload_by_kernel"] / lines[0]["payload_by_kernel"]
        assert line["bytes_over_ddp"] == pytest.approx(share, rel=1e-3)
    assert "over limit" in shown
    assert "of ddp's" in shown
    assert "bytegrad" in shown
    written = folder / "steps-2x1-1gbit-cnn.jsonl"
    assert [json.loads(line) for line in written.read_text().splitlines()] == lines
    assert written.with_suffix(".png").stat().st_size > 0


@needs_hosts
def test_where_ranks_share_hosts_they_go_by_hosts_unless_the_variant_is_flat() -> None:
    found, _ = run_command("ddp,bytegrad,flat_bytegrad", "--ranks-per-host", "2")
    lines = {line["algorithm"]: line for line in found}
    model = 1.03 * lines["ddp"]["parameters"]  # encoded
    # Two hosts: half of it twice. In one level Gloo's all-to-all sends all of it, its ring of 4 three quarters.
    assert lines["bytegrad"]["payload_by_kernel"] == pytest.approx(model, rel=0.1)
    assert lines["flat_bytegrad"]["payload_by_kernel"] == pytest.approx(1.75 * model, rel=0.1)
    assert lines["bytegrad"]["bytes_over_ddp"] == pytest.approx(1.03 / 4 / 1.5, rel=0.1)


def test_a_variant_is_compared_with_stock_ddp_in_its_own_turns() -> None:
    def turns(*seconds):
        counted = {"bytes_counted": [1.0], "bytes_of_kernel": [1.0], "payload_of_kernel": [1.25e6]}
        return [{"seconds": list(seconds), **counted}, {"seconds": [0.0] * len(seconds), **counted}]

    about = {"hosts": 2, "ranks_per_host": 1, "rate": "100mbit", "model": "gpt"}
    first = {"alone, AdamW": turns(1, 1), "ddp": turns(4, 4), "bytegrad": turns(2, 2)}
    slower = {"alone, AdamW": turns(3, 3), "ddp": turns(12, 12), "int4": turns(4, 4)}
    lines = {line["algorithm"]: line for line in of_steps([first, slower, {"async": turns(1, 2)}], about)}
    assert list(lines) == ["ddp", "bytegrad", "int4", "async"]
    assert (lines["ddp"]["step_ms"], lines["int4"]["compute_ms"]) == (4000, 3000)
    assert [lines[name]["speedup_over_ddp"] for name in ("bytegrad", "int4", "async")] == [2, 3, 3]
    assert {line["bytes_over_ddp"] for line in lines.values()} == {1}
    assert lines["async"]["step_over_allowed"] is None


def test_a_step_is_over_no_limit_where_nothing_leaves_a_host() -> None:
    ranks = [{"seconds": [1.0], "bytes_counted": [5.0], "bytes_of_kernel": [0.0], "payload_of_kernel": [0.0]}]
    about = {"hosts": 1, "ranks_per_host": 4, "rate": "100mbit", "model": "gpt"}
    _, line = of_steps([{"alone, AdamW": ranks, "ddp": ranks, "bytegrad": ranks}], about)
    assert (line["byte_limit_ms"], line["step_over_limit"], line["bytes_over_ddp"]) == (0, None, None)


def test_help_of_the_command_shows_examples_and_every_variant(fork) -> None:
    code, out, err = fork(["-m", "gossamer.launch.cli", "bench", "network", "--help"]).finish()
    assert code == 0, err
    assert "examples:" in out
    for name in ("ddp_fp16_hook", "bytegrad", "local_sgd", "flat_int4"):
        assert name in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--to-loss --algorithms bytegrad", "--to-loss: the others are judged by ddp"),
        ("--hosts 0", "--hosts: must be at least 1, got 0"),
        ("--algorithms flat", "--algorithms: must be all, or some of"),
        ("--rate quick", "rate: must be a number above 0"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_starts(flags, message, capsys) -> None:
    from gossamer.launch import cli

    assert cli.main(["bench", "network", *flags.split()]) == 1
    assert message in capsys.readouterr().err


def test_the_study_judges_the_figures_of_its_parts(tmp_path, fork) -> None:
    names = {"bytegrad": (1.1, 3.7, 1.8), "int4": (1.2, 6.5, 3.0), "onebit": (1.9, 16.0, 9.0)}
    steps = [
        {
            "algorithm": name,
            "step_over_limit": over,
            "speedup_over_ddp": ddp,
            "speedup_over_fp16_hook": fp16,
            "bytes_difference": 0.01 if name == "int4" else -0.06,
        }
        for name, (over, ddp, fp16) in names.items()
    ]
    (tmp_path / "steps-100mbit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    study = ROOT / "benchmarks" / "netlab" / "study.py"
    code, out, err = fork([str(study), "targets", "--results", str(tmp_path)]).finish()
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["value"], line["at_most"] or line["at_least"], line["met"]) for line in lines] == [
        (1.1, 1.15, True),
        (1.2, 1.15, False),
        (3.7, 3.6, True),
        (1.8, 1.9, False),
        (6.5, 6, True),
        (16.0, 15, True),
        (0.06, 0.05, False),
    ]
    assert "missed" in err
    assert len((tmp_path / "targets.jsonl").read_text().splitlines()) == len(lines)


def test_the_study_judges_what_the_defaults_save_where_ranks_share_hosts(tmp_path, fork) -> None:
    found = {
        "gradient_allreduce": (0.66, 1.5, 800),
        "flat": (1.0, 1.0, 1200),
        "bytegrad": (0.19, 5.0, 240),
        "flat_bytegrad": (0.3, 3.1, 230),
    }
    lines = [
        {
            "algorithm": name,
            "bytes_over_ddp": share,
            "speedup_over_ddp": ddp,
            "step_ms": ms,
            "step_over_allowed": 0.9,
        }
        for name, (share, ddp, ms) in found.items()
    ]
    (tmp_path / "hosts-2x2-100mbit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    study = ROOT / "benchmarks" / "netlab" / "study.py"
    code, out, err = fork([str(study), "targets", "--results", str(tmp_path)]).finish()
    assert code == 0, err
    judged = {line["what"]: line["met"] for line in map(json.loads, out.splitlines())}
    assert judged == {
        "bytes over ddp's, 2x2-100mbit, bytegrad": False,
        "bytes over ddp's, 2x2-100mbit, gradient_allreduce": True,
        "times ddp's step, 2x2-100mbit, bytegrad": True,
        "step over that of one level, 2x2-100mbit, gradient_allreduce": True,
        "step over limit and computing, 2x2-100mbit, gradient_allreduce": True,
        "step over that of one level, 2x2-100mbit, bytegrad": False,
        "step over limit and computing, 2x2-100mbit, bytegrad": True,
    }
