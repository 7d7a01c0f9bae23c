# `gossamer bench`: its figures are about what they say; it runs inside a job and alone; it refuses what it cannot
# measure. No figure that depends on time is judged here. `gossamer bench network` has tests of its own.

import json

import pytest
import torch

from gossamer.bench import measuring, options
from gossamer.bench.cli import SUBCOMMANDS
from gossamer.errors import ConfigError
from gossamer.launch.cli import main as gossamer

FIELDS = {
    "benchmark", "what", "value", "unit", "baseline", "baseline_value", "ratio", "at_least", "at_most", "target_of",
    "met", "median", "spread", "samples", "command", "torch", "machine", "instruction_set", "load",
}  # fmt: skip
PNG = b"\x89PNG"


def lines_of(out: str) -> list[dict]:
    lines = [json.loads(line.removeprefix("[0] ")) for line in out.splitlines()]
    for line in lines:
        assert line.keys() >= FIELDS, FIELDS - line.keys()
        assert line["command"].startswith(f"gossamer bench {line['benchmark']}")
    return lines


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_says_what_is_measured_and_has_examples(name, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        gossamer(["bench", name, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "examples:" in said
    assert f"gossamer bench {name}" in said


def test_all_benchmarks_are_listed(capsys) -> None:
    with pytest.raises(SystemExit):
        gossamer(["bench", "--help"])
    said = capsys.readouterr().out
    assert [name for name in SUBCOMMANDS if f"\n  {name} " not in said] == []


REFUSED = {
    "codec --codecs int9": "int9",
    "codec --size 10B": "multiple",
    "codec --size 64KiB,1MiB": "one size",
    "codec --rounds 0": "--rounds: must be at least 1",
    "codec --plot codecs.pdf": ".png",
    "allreduce --sizes big": "'big'",
    "allreduce --backends nccl": "--backends: must be all, or some of gossamer, gloo",
    "allreduce -np 0": "-np must be at least 1, got 0",
    "train --algorithms sgd": "--algorithms: must be all, or some of gradient_allreduce",
    "train --steps 0": "--steps: must be at least 1",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_measured_is_refused_with_the_value(arguments, capsys) -> None:
    assert gossamer(["bench", *arguments.split()]) == 1
    said = capsys.readouterr()
    assert REFUSED[arguments] in said.err
    assert said.out == ""


def test_workers_are_not_started_inside_a_job(monkeypatch, capsys) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, text in place.items():
        monkeypatch.setenv(name, text)
    assert gossamer(["bench", "allreduce", "-np", "2"]) == 1
    assert "this is rank 1 of 2 already, which torchrun started" in capsys.readouterr().err


def test_sizes_are_bytes_of_whole_float32() -> None:
    assert options.sizes("1MiB, 4KiB,64,4096", "--sizes") == [64, 4096, 1 << 20]
    with pytest.raises(ConfigError, match="--sizes.*6"):
        options.sizes("4KiB,6", "--sizes")
    assert [measuring.label(count) for count in (7, 4096, 3 << 20, (1 << 20) + 4)] == [
        "7 B", "4 KiB", "3 MiB", "1048580 B",
    ]  # fmt: skip


def test_turns_are_interleaved_and_the_order_moves_on() -> None:
    calls: list[str] = []
    bodies = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    turns = measuring.interleaved(bodies, rounds=2, repeats=2, untimed=0, before=lambda: calls.append("|"))
    assert "".join(calls) == "aabbcc" + "|aa|bb|cc" + "|bb|cc|aa"
    assert {len(each.seconds) for each in turns.values()} == {2}
    assert {len(each.mean_seconds) for each in turns.values()} == {2}


def test_codecs_have_the_bytes_and_errors_that_their_bits_give(capsys, tmp_path) -> None:
    plot = tmp_path / "plots" / "codecs.png"
    threads = torch.get_num_threads()
    assert gossamer(["bench", "codec", "--size", "64KiB", "--rounds", "1", "--plot", str(plot)]) == 0
    assert torch.get_num_threads() == threads
    said = capsys.readouterr()
    by_name = {line["codec"]: line for line in lines_of(said.out)}
    assert list(by_name) == list(options.CODECS)
    bytes_of = {name: line["bytes_per_element"] for name, line in by_name.items()}
    assert (bytes_of["fp16"], bytes_of["bf16"]) == (2.0, 2.0)
    assert bytes_of["topk"] == pytest.approx(0.08, rel=0.01)
    assert 1.0 < bytes_of["int8"] < 1.1
    assert 0.5 < bytes_of["int4"] < 0.6
    assert 0.125 < bytes_of["onebit"] < 0.2
    errors = [by_name[name]["relative_error"] for name in ("fp16", "bf16", "int8", "int4", "onebit")]
    assert errors == sorted(errors)
    assert errors[0] < 1e-3 < errors[2] < 0.02 < errors[3] < errors[4] < 1
    assert "relative error" in said.err
    assert plot.read_bytes()[:4] == PNG


def test_allreduce_inside_a_job_compares_with_torch_in_the_same_run(fork, tmp_path) -> None:
    arguments = "--sizes 4KiB,64KiB --codecs none,int8,onebit-ef --rounds 1 --plot all.png"
    argv = ["-m", "gossamer", "run", "-np", "2", "-m", "gossamer", "bench", "allreduce", *arguments.split()]
    code, out, err = fork(argv).finish()
    assert code == 0, err
    lines = lines_of(out)
    names = [
        "torch, gloo",
        *(f"{b}, {c}" for b in ("gossamer", "gloo") for c in ("none", "int8", "onebit-ef")),
    ]
    assert [line["contender"] for line in lines] == 2 * names
    for line in lines:
        assert (line["ranks"], line["unit"]) == (2, "us")
        rate = line["nbytes"] / line["value"] / 1e3
        assert line["algorithm_gb_per_s"] == pytest.approx(rate, rel=1e-3)
        assert line["bus_gb_per_s"] == pytest.approx(rate, rel=1e-3)  # 2 (n - 1) / n is 1
        if line["contender"] == "torch, gloo":
            assert line["baseline"] is None
            continue
        assert line["baseline"] == "torch, gloo"
        assert line["ratio"] > 0
        share = {"none": 1.0, "int8": 0.26, "onebit-ef": 0.0352}[line["codec"]]
        assert line["bytes_sent"] == pytest.approx(share * line["nbytes"], rel=0.15)
        error = {"none": 0, "int8": 0.01, "onebit-ef": 0.6}[line["codec"]]
        assert line["relative_error"] == pytest.approx(error, rel=0.5, abs=1e-5)
    assert (tmp_path / "all.png").read_bytes()[:4] == PNG


def test_train_alone_starts_workers_and_counts_their_bytes(fork) -> None:
    arguments = "-np 2 --steps 10 --rows 1 --algorithms gradient_allreduce,bytegrad,local_sgd"
    code, out, err = fork(["-m", "gossamer", "bench", "train", *arguments.split()]).finish()
    assert code == 0, err
    stock, exact, bytegrad, local = lines_of(out)
    assert [line["algorithm"] for line in (stock, exact)] == ["torch DDP", "gradient_allreduce"]
    assert stock["bytes_per_step"] is None
    # 1.07 M parameters of float32, a little for the agreement of each step
    assert exact["bytes_per_step"] == pytest.approx(4.26e6, rel=0.02)
    assert bytegrad["bytes_per_step"] == pytest.approx(0.255 * exact["bytes_per_step"], rel=0.02)
    assert local["bytes_per_step"] < 0.12 * exact["bytes_per_step"]
    assert "times as fast" in err
