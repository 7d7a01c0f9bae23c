# `gossamer plan`: quantities with units, its output, its plots, what it refuses, and measuring inside a job.

import json
import time

import pytest
import torch
from torch import nn

from gossamer import planner, units
from gossamer.errors import ConfigError
from gossamer.launch import cli
from gossamer.planner import METHODS, predict
from tests.support.forks import fork_job
from tests.support.ranks import run_ranks

README = "--params 1.2e9 --ranks 64 --hosts 8 --bandwidth 10gbit --latency 50us --compute-ms 400"


def small_network() -> nn.Module:
    return nn.Sequential(nn.Linear(96, 130), nn.LayerNorm(130), nn.Linear(130, 7))


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_rate, "10gbit", 1.25e9),
        (units.parse_rate, "100Mbit/s", 12.5e6),
        (units.parse_rate, "2.5 GB/s", 2.5e9),
        (units.parse_seconds, "50us", 50e-6),
        (units.parse_seconds, "1.5ms", 1.5e-3),
        (units.parse_bytes, "25MiB", 25 << 20),
        (units.parse_bytes, "4096", 4096),
        (units.parse_count, "1.2e9", 1_200_000_000),
        (units.parse_count, "7B", 7_000_000_000),
    ],
)
def test_quantities_are_read_with_their_units(parse, text, value) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *(
            (units.parse_rate, text)
            for text in ("10", "10gbps", "10gb", "-1gbit", "0gbit", "fast", "mB/s", "infgbit")
        ),
        *((units.parse_seconds, text) for text in ("50", "50 u", "0ms", "nans")),
        *((units.parse_bytes, text) for text in ("1.5", "25mib", "0")),
        *((units.parse_count, text) for text in ("1.5", "many", "1e-3", "7 b")),
    ],
)
def test_a_quantity_that_is_not_one_is_named(parse, text) -> None:
    with pytest.raises(ConfigError, match=f"got {text!r}"):
        parse(text)


def plan(capsys, text: str) -> str:
    assert cli.main(["plan", *text.split()]) == 0
    return capsys.readouterr().out


def test_the_readmes_command_shows_every_algorithm_and_says_what_to_use(capsys) -> None:
    out = plan(capsys, README)
    assert [name for name in METHODS if name not in out] == []
    assert "Use " in out
    assert "models go by hosts" in out
    assert "docs/which-one.md" in out


def test_json_has_a_line_for_the_inputs_each_algorithm_and_the_advice(capsys) -> None:
    lines = [json.loads(line) for line in plan(capsys, f"{README} --json").splitlines()]
    assert lines[0]["inputs"]["ranks"] == 64
    assert lines[0]["inputs"]["by_hosts"] is True
    assert {line["algorithm"] for line in lines[1:-1]} == set(METHODS)
    steps = [line["step_s"] for line in lines[1:-1]]
    assert steps == sorted(steps)
    assert lines[-1]["use"] in METHODS


def test_plots_are_written_up_to_10000_ranks(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    out = plan(capsys, f"{README} --algorithms bytegrad async --plot {tmp_path / 'new'}")
    for name in ("plan-bandwidth.png", "plan-ranks.png"):
        assert (tmp_path / "new" / name).read_bytes()[:4] == b"\x89PNG"
        assert name in out


def test_a_model_of_ones_own_is_planned_without_its_memory(capsys) -> None:
    flags = f"--model {__name__}:small_network --ranks 4 --compute-ms 9 --device cpu --json"
    inputs = json.loads(plan(capsys, flags).splitlines()[0])["inputs"]
    assert inputs["parameters"] == sum(p.numel() for p in small_network().parameters())


def test_help_has_examples(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    assert f"gossamer plan {README}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--params 1e6 --compute-ms 4", "--ranks must be given"),
        ("--params 1e6 --ranks 4", "--compute-ms must be given"),
        ("--ranks 4 --compute-ms 4", "--params or --model must be given"),
        ("--params 1e6 --model a:b --ranks 4 --compute-ms 4", "exclude each other"),
        ("--params 1e6 --ranks 4 --compute-ms 4 --hosts 8", "hosts must be at most 4 ranks, got 8"),
        ("--params 1e6 --ranks 4 --compute-ms 4 --bandwidth 10", "got '10'"),
        ("--params 1e6 --ranks 4 --compute-ms -4", "compute_s must not be negative"),
        ("--params 1e6 --ranks 4 --compute-ms 4 --algorithms fast", "got 'fast'"),
        ("--model nowhere:make --ranks 4 --compute-ms 4", "got 'nowhere:make'"),
        ("--model json:dumps --ranks 4 --compute-ms 4", "must be MODULE:FACTORY"),
        ("--measure --ranks 4", "--measure finds out --ranks"),
        ("--measure", "needs a job of 2 workers or more"),
    ],
)
def test_flags_that_do_not_fit_are_refused_with_their_values(capsys, flags, message) -> None:
    assert cli.main(["plan", *flags.split()]) == 1
    assert message in capsys.readouterr().err


# --- measuring ---


def test_measuring_gives_what_a_prediction_needs(monkeypatch) -> None:
    monkeypatch.setitem(
        planner.measure.__globals__, "_LARGEST", 1 << 18
    )  # bytes: threads share memory, so no message takes long
    found = run_ranks(4, lambda comm: planner.measure(comm, hosts=[[0, 1], [2, 3]]))
    assert len({repr(each) for each in found}) == 1, "the ranks must agree"
    network = found[0].network
    assert (network.ranks, network.hosts, network.per_host, network.payload) == (4, 2, 2, 1.0)
    for value in (network.bandwidth, network.local_bandwidth, found[0].speeds.memory, found[0].speeds.flops):
        assert 1e6 < value < 1e13
    assert {"Int8", "Int4", "OneBit"} <= set(found[0].speeds.codecs)
    problem, _ = planner.transformer(3_000_000, 0.1, speeds=found[0].speeds)
    assert predict(problem, network, "int4").step_s > 0.1


def test_compute_is_the_slowest_ranks_step() -> None:
    class Slow(nn.Linear):
        def forward(self, rows: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
            time.sleep(float(seconds))
            return super().forward(rows)

    def body(comm):
        return planner.compute_of(
            comm, Slow(2, 2), (torch.ones(1, 2), torch.tensor(0.02 * comm.rank)), steps=3
        )

    found = run_ranks(3, body)
    assert len(set(found)) == 1
    compute_s, forward = found[0]
    assert 0.04 <= compute_s < 5
    assert 0.5 < forward <= 1


def test_the_command_measures_inside_a_job_and_rank_0_prints(tmp_path) -> None:
    script = "import sys\nfrom gossamer.launch import cli\nsys.exit(cli.main(sys.argv[1:]))\n"
    lines = fork_job(
        script, 2, tmp_path, "plan", "--measure", "--json", "--algorithms", "bytegrad"
    ).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == 3
    assert found[0]["inputs"]["ranks"] == 2
    assert found[0]["inputs"]["compute_s"] > 0
    assert found[1]["algorithm"] == "bytegrad"
