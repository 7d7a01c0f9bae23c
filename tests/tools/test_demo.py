# `gossamer demo`: its figures are true, its byte counter counts bytes, and it fails when the runs disagree.

import json
import math
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer import netlab
from gossamer.demo import cli, link, wire
from gossamer.errors import GossamerError
from gossamer.launch.cli import main as gossamer
from gossamer.workloads import source_text
from gossamer.workloads.gpt import CONTEXT, GPT
from tests.support import quick_python
from tests.support.started import starting

TINY = ["demo", "--steps", "4", "--ranks", "2", "--batch", "2", "--link-steps", "0"]
PARAMETERS = sum(parameter.numel() for parameter in GPT().parameters())


def figures(**changes: Any) -> dict[str, Any]:
    """Figures of runs that agree, except for the runs named in ``changes``."""
    good = {"validation_loss": 2.0, "equal_bits": True, "losses": [2.5, 2.1]}
    return {name: good | changes.get(name, {}) for name in cli.TOLERANCE}


def processes_naming(text: str) -> list[int]:
    """Ids of the processes with ``text`` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_wire_counts_the_bytes_of_every_open_tcp_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = wire.bytes_sent()
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as peer:
            client.sendall(bytes(123_457))
            assert len(peer.recv(123_457, socket.MSG_WAITALL)) == 123_457
            assert wire.bytes_sent() - before == 123_457
            peer.sendall(bytes(1_009))
            assert len(client.recv(1_009, socket.MSG_WAITALL)) == 1_009
            assert wire.bytes_sent() - before == 124_466


def test_wire_ignores_what_is_not_tcp() -> None:
    before = wire.bytes_sent()
    left, right = socket.socketpair()
    with left, right, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        left.sendall(bytes(1000))
        datagram.sendto(bytes(1000), ("127.0.0.1", 9))
        assert wire.bytes_sent() == before


def test_standard_library_is_the_same_text_each_time_and_split_by_file() -> None:
    train, validation = source_text.standard_library()
    again = source_text.standard_library.__wrapped__()  # without its cache
    assert torch.equal(train, again[0])
    assert torch.equal(validation, again[1])
    text = validation.numpy().tobytes()
    assert text[:500] not in train.numpy().tobytes()


def test_batch_depends_on_the_seed_alone_and_holds_neighbouring_bytes() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    rows = source_text.batch(text, seed=3, rows=6, context=10)
    assert rows.shape == (6, 11)
    assert torch.equal(rows, source_text.batch(text, seed=3, rows=6, context=10))
    assert not torch.equal(rows, source_text.batch(text, seed=4, rows=6, context=10))
    assert torch.equal(rows.diff(dim=1), torch.ones(6, 10, dtype=torch.int64))


def test_model_has_about_a_million_parameters_and_starts_at_a_uniform_guess() -> None:
    torch.manual_seed(0)
    loss = GPT()(torch.randint(256, (8, CONTEXT + 1)))
    assert 0.9e6 < PARAMETERS < 1.2e6
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_model_sees_no_later_byte() -> None:
    block = GPT().blocks
    x = torch.randn(1, CONTEXT, 128)
    changed = x.clone()
    changed[:, 40:] += 1.0
    assert torch.equal(block(x)[:, :40], block(changed)[:, :40])
    assert not torch.equal(block(x)[:, 40:], block(changed)[:, 40:])


def test_check_accepts_runs_within_their_tolerance() -> None:
    cli.check(figures(ddp={"validation_loss": 2.0019}, bytegrad={"validation_loss": 1.981}))


@pytest.mark.parametrize(
    ("name", "loss"),
    [("ddp", 2.0021), ("gradient_allreduce", 1.9979), ("bytegrad", 2.021), ("ddp", math.nan)],
)
def test_check_refuses_losses_that_disagree_and_says_the_values(name: str, loss: float) -> None:
    with pytest.raises(GossamerError, match=rf"losses disagree: {name} {loss:.6f} against 2\.000000"):
        cli.check(figures(**{name: {"validation_loss": loss}}))


def test_check_refuses_a_run_that_ended_in_nan_everywhere() -> None:
    with pytest.raises(GossamerError, match="losses disagree"):
        cli.check(figures(**{name: {"validation_loss": math.nan} for name in cli.TOLERANCE}))


def test_check_refuses_ranks_with_different_bits() -> None:
    with pytest.raises(GossamerError, match="different bits after 2 steps of bytegrad"):
        cli.check(figures(bytegrad={"equal_bits": False}))


def test_demo_says_before_training_that_matplotlib_is_missing(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(cli, "train", lambda _: pytest.fail("training began"))
    assert gossamer(TINY) == 1
    assert "pip install it, or pass --no-plot" in capsys.readouterr().err


def test_demo_refuses_a_rate_that_is_none_before_training(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "train", lambda _: pytest.fail("training began"))
    assert gossamer(["demo", "--no-plot", "--rate", "fast"]) == 1
    assert "rate: must be a number above 0" in capsys.readouterr().err
    assert gossamer(["demo", "--no-plot", "--link-steps", "-1"]) == 1
    assert "--link-steps must be at least 0, got -1" in capsys.readouterr().err


def test_demo_without_root_says_why_and_what_the_bytes_need(monkeypatch, capsys) -> None:
    sent = {"one process": 0, "ddp": 6.4e6, "gradient_allreduce": 6.4e6, "bytegrad": 1.6e6}
    runs = figures(**{name: {"bytes_per_step": count, "step_ms": 100.0} for name, count in sent.items()})
    monkeypatch.setattr(cli, "train", lambda _: runs)
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    assert gossamer(["demo", "--no-plot", "--rate", "50mbit"]) == 0
    out = capsys.readouterr().out
    assert "times" not in out  # a table without the columns of the slow links
    assert "not trained over links of 50 Mbit/s: network namespaces need root, got user id 65534" in out
    assert "need: ddp 1,024 ms, gradient_allreduce 1,024 ms, bytegrad 256 ms." in out


def test_demo_fails_when_ranks_on_slow_links_hold_different_bits(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "train", lambda _: figures())
    monkeypatch.setattr(cli.netlab, "missing", lambda: "")
    monkeypatch.setattr(link, "train", lambda *_, **__: figures(bytegrad={"equal_bits": False}))
    assert gossamer(["demo", "--no-plot"]) == 1
    assert "different bits after 2 steps of bytegrad" in capsys.readouterr().err


unavailable = netlab.missing()


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of a tiny demo, over slow links too where there can be hosts; what it printed; and its process id."""
    code = "import os, sys; print(os.getpid(), flush=True); from gossamer.launch import cli; sys.exit(cli.main())"
    folder = tmp_path_factory.mktemp("demo")
    flags = [*TINY[:-1], "0" if unavailable else "4", "--rate", "50mbit", "--json", "figures.json"]
    with starting(quick_python.program(), folder) as start:
        ended, out, errors = start(["-c", code, *flags, "--out", "plots.png"]).finish()
    assert ended == 0, errors
    process, _, out = out.partition("\n")
    return folder, out, process


@pytest.mark.skipif(bool(unavailable), reason=unavailable or "available")
def test_demo_is_faster_on_slow_links_with_fewer_bytes_and_leaves_no_host(tiny_run) -> None:
    folder, out, process = tiny_run
    assert "step ms at" in out
    runs = json.loads((folder / "figures.json").read_text())["slow_runs"]
    assert list(runs) == link.RUNS
    bytes_s = 50e6 / 8
    assert runs["ddp"]["step_ms"] > 900 * 4 * PARAMETERS / bytes_s
    assert runs["bytegrad"]["bytes_per_step"] <= 0.26 * runs["ddp"]["bytes_per_step"]
    assert link.speedup(runs, "bytegrad") > 1.5  # 3.5 on an idle machine
    assert list(Path("/run/netns").glob(f"gs{process}x*")) == []


def test_demo_refuses_zero_steps(capsys) -> None:
    assert gossamer(["demo", "--steps", "0"]) == 1
    assert "at least 1, got (0, 4, 8)" in capsys.readouterr().err


def test_demo_ends_with_equal_bits_equal_losses_and_a_quarter_of_the_bytes(tiny_run) -> None:
    folder, out, _ = tiny_run
    assert "bytegrad" in out
    assert (folder / "plots.png").stat().st_size > 10_000
    written = json.loads((folder / "figures.json").read_text())
    assert [written[key] for key in ("steps", "ranks", "batch", "seed")] == [4, 2, 2, 0]
    runs = written["runs"]
    cli.check(runs)
    assert list(runs) == list(cli.TOLERANCE)
    assert all(len(run["losses"]) == len(run["bytes"]) == 4 for run in runs.values())
    ring = 4 * PARAMETERS  # bytes of fp32 that each of two ranks sends in a ring all-reduce
    assert runs["one process"]["bytes_per_step"] < 1000
    assert runs["ddp"]["bytes_per_step"] == pytest.approx(ring, rel=0.01)
    assert runs["gradient_allreduce"]["bytes_per_step"] == pytest.approx(ring, rel=0.01)
    assert runs["bytegrad"]["bytes_per_step"] <= 0.26 * ring
    for name in ("gradient_allreduce", "bytegrad"):
        assert runs[name]["engine_bytes_per_step"] == pytest.approx(runs[name]["bytes_per_step"], rel=0.02)


def test_demo_fails_without_a_table_when_the_losses_disagree(monkeypatch, capfd, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "train", lambda _: figures(ddp={"validation_loss": 2.1}))
    assert gossamer([*TINY, "--no-plot", "--json", str(tmp_path / "figures.json")]) == 1
    out, errors = capfd.readouterr()
    assert "the losses disagree: ddp" in errors
    assert "validation" not in out
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.usefixtures("forks_as_python")
def test_demo_fails_with_the_workers_own_error(monkeypatch, capfd) -> None:
    monkeypatch.setattr(cli, "TOLERANCE", {"no such algorithm": 0.0})
    assert gossamer([*TINY, "--no-plot"]) == 1
    errors = capfd.readouterr().err
    assert "a worker failed" in errors
    assert "no such algorithm" in errors


def test_ctrl_c_stops_all_workers_quietly(fork, tmp_path: Path) -> None:
    argv = ["-m", "gossamer.launch.cli", "demo", "--steps", "100000", "--ranks", "2", "--batch", "1"]
    demo = fork([*argv, "--no-plot"], env={"TMPDIR": str(tmp_path)})  # which all command lines then name
    deadline_s = time.monotonic() + 30
    while len(processes_naming(str(tmp_path))) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert len(processes_naming(str(tmp_path))) >= 3, "launcher and two workers never started"
    time.sleep(1)
    os.kill(demo.process.pid, signal.SIGINT)
    code, _, errors = demo.finish()
    assert code == 130
    assert errors.strip() == "demo: stopped"
    assert processes_naming(str(tmp_path)) == []
