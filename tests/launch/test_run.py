# `gossamer run` with real workers: the output when all goes well, and when a worker fails.

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import gossamer
from gossamer.launch import cli

RUN = ["-m", "gossamer.launch.cli", "run"]


@pytest.fixture
def script(tmp_path):
    def write(body: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(
            "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(body)
        )
        return name

    return write


def test_output_is_prefixed_by_rank_and_arguments_reach_the_script(start, script) -> None:
    train = script("print('arguments', sys.argv[1:], __name__)")
    code, out, err = start([*RUN, "-np", "2", train, "-np", "9", "--epochs", "3"]).finish()
    assert code == 0, err
    line = "arguments ['-np', '9', '--epochs', '3'] __main__"
    assert sorted(out.splitlines()) == [f"[0] {line}", f"[1] {line}"]


PIECES = """
import sys, time
for number in range(3):
    for piece in ("line ", str(number), " of three\\n"):
        sys.stdout.write(piece)
        sys.stdout.flush()
        time.sleep(0.15)
print("no end", end="", flush=True)
"""


@pytest.mark.parametrize(
    "where",
    [["-np", "2"], ["-np", "2", "-H", "localhost:1,127.0.0.1:1"], ["--min-np", "2", "--max-np", "2"]],
    ids=["here", "hosts", "elastic"],
)
def test_a_line_that_a_worker_writes_in_pieces_comes_whole(fork, tmp_path, where) -> None:
    (tmp_path / "pieces.py").write_text(PIECES)
    code, out, err = fork([*RUN, *where, "pieces.py"]).finish()
    assert code == 0, err
    lines = ["line 0 of three", "line 1 of three", "line 2 of three", "no end"]
    assert sorted(out.splitlines()) == [f"[{rank}] {line}" for rank in (0, 1) for line in lines]


def test_script_sees_its_own_folder_and_name(fork, script, tmp_path) -> None:
    script("VALUE = 42", "beside.py")
    train = script("import beside; print(beside.VALUE, __file__, sys.argv[0], sys.path[0])")
    code, out, err = fork([*RUN, "-np", "1", train]).finish()
    assert code == 0, err
    assert out.strip() == f"[0] 42 {train} {train} {tmp_path}"


def test_module_form_runs_a_module(fork, script, tmp_path) -> None:
    (tmp_path / "package").mkdir()
    script("print(__package__, sys.argv[1:])", "package/train.py")
    code, out, err = fork([*RUN, "-np", "1", "-m", "package.train", "--fast"]).finish()
    assert code == 0, err
    assert out.strip() == "[0] package ['--fast']"


def test_workers_find_each_other_with_init(fork, script) -> None:
    train = script(
        "import gossamer as gs; gs.init(); print(gs.rank(), gs.size(), gs.local_size()); gs.shutdown()"
    )
    code, out, err = fork([*RUN, "--nproc-per-node", "2", train]).finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[0] 0 2 2", "[1] 1 2 2"]


def test_one_failing_worker_ends_all_and_its_traceback_comes_last(fork, script) -> None:
    train = script("""
        def step():
            if rank == 1:
                raise ValueError("boom on rank 1")
            time.sleep(60)
        step()
    """)
    began = time.monotonic()
    code, _, err = fork([*RUN, "-np", "2", train]).finish()
    assert code == 1
    assert time.monotonic() - began < 30
    tail = err[err.rindex("gossamer run:") :].splitlines()
    assert tail[0].startswith("gossamer run: rank 1 failed with exit code 1")
    assert tail[1] == "Traceback (most recent call last):"
    assert 'train.py", line' in tail[2]
    assert tail[-1] == "ValueError: boom on rank 1"


def test_root_cause_is_the_first_failure_not_the_lost_connection(fork, script) -> None:
    train = script("""
        import torch, torch.distributed as dist, gossamer as gs
        gs.init()
        x = torch.ones(1)
        dist.all_reduce(x)
        if rank == 1:
            raise KeyError("the real cause")
        dist.all_reduce(x)
    """)
    code, _, err = fork([*RUN, "-np", "2", train]).finish()
    assert code == 1
    assert err.splitlines()[-1] == "KeyError: 'the real cause'"


def test_worker_killed_while_it_reports_its_failure_is_named_with_its_signal(fork, script) -> None:
    train = script("""
        class DiesInTheReport:
            def __str__(self):
                os.kill(os.getpid(), 9)
        sys.exit(DiesInTheReport())
    """)
    code, _, err = fork([*RUN, "-np", "2", train]).finish()
    assert code == 128 + 9
    assert "was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]


def test_killed_worker_is_named_with_its_signal(fork, script) -> None:
    train = script("""
        if rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(60)
    """)
    code, _, err = fork([*RUN, "-np", "2", train]).finish()
    assert code == 128 + 9
    assert "rank 1 was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]


NOTICES = """
    import torch, torch.distributed as dist, gossamer as gs
    gs.init()
    x = torch.ones(1)
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), 15)
    dist.all_reduce(x)
"""
SLEEPS = """
    if rank == 1:
        os.kill(os.getpid(), 15)
    time.sleep(60)
"""
SAYS_TERMINATED = "gossamer run: rank 1 was killed by signal 15 (SIGTERM) (then rank 0 ended too)"


@pytest.mark.parametrize(
    ("body", "flags", "env"),
    [
        (NOTICES, ["-np", "2"], {}),
        (NOTICES, ["-np", "2", "--monitor-interval", "4"], {}),  # the agent sees both ends at once
        (NOTICES, ["-np", "2", "-H", "localhost:1,127.0.0.1:1"], {}),
        (SLEEPS, ["-np", "2"], {}),
        (SLEEPS, ["-np", "2"], {"LOGLEVEL": "CRITICAL"}),
    ],
    ids=["noticed", "noticed-and-ended", "hosts", "unnoticed", "without-lines-of-torch"],
)
def test_a_worker_that_another_process_terminates_is_the_cause(fork, script, body, flags, env) -> None:
    code, _, err = fork([*RUN, *flags, script(body)], env=env).finish()
    assert code == 128 + 15, err
    assert err.splitlines()[-1] == SAYS_TERMINATED


@pytest.mark.parametrize("level", ["WARNING", "CRITICAL"])
def test_a_worker_that_the_agent_ends_is_not_the_cause(fork, script, level) -> None:
    train = script("""
        if rank == 2:
            raise ValueError("the real cause")
        time.sleep(60)
    """)
    code, _, err = fork([*RUN, "-np", "3", train], env={"LOGLEVEL": level}).finish()
    assert code == 1
    assert "gossamer run: rank 2 failed with exit code 1 (then rank 0, 1 ended too)" in err.splitlines()
    assert err.splitlines()[-1] == "ValueError: the real cause"


def test_exit_code_of_the_script_is_returned(fork, script) -> None:
    train = script("sys.exit(7 if rank == 0 else 0)")
    code, _, err = fork([*RUN, "-np", "2", train]).finish()
    assert code == 7
    assert "rank 0 failed with exit code 7" in err.splitlines()[-1]


def test_syntax_error_is_reported_like_any_other(fork, script) -> None:
    code, _, err = fork([*RUN, "-np", "1", script("x = = 1")]).finish()
    assert code == 1
    assert err.splitlines()[-1].startswith("SyntaxError")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_workers(fork, script, tmp_path, number) -> None:
    train = script("""
        open(f"pid{rank}.part", "w").write(str(os.getpid()))
        os.rename(f"pid{rank}.part", f"pid{rank}")
        time.sleep(60)
    """)
    command = fork([*RUN, "-np", "2", train])
    files = [tmp_path / f"pid{rank}" for rank in range(2)]
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "workers did not start"
        time.sleep(0.05)
    command.process.send_signal(number)
    code, _, err = command.finish()
    assert code == 128 + number
    assert f"stopped by {number.name}" in err.splitlines()[-1]
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_max_restarts_starts_the_workers_again(fork, script) -> None:
    train = script("""
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt)
        if attempt == "0":
            raise RuntimeError("first attempt")
    """)
    code, out, err = fork([*RUN, "-np", "1", "--max-restarts", "1", train]).finish()
    assert code == 0, err
    assert "attempt 1" in out


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL)"),
        ("sys.exit(3)", "failed with exit code 3"),
    ],
)
def test_a_failure_prints_lines_of_gossamer_run_alone(fork, script, act, said) -> None:
    train = script(f"""
        if rank == 1:
            {act}
        time.sleep(60)
    """)
    _, out, err = fork([*RUN, "-np", "2", "--max-restarts", "1", train]).finish()
    assert out == ""
    assert err.splitlines() == [
        f"gossamer run: local rank 1 {said}; all workers start again (1 of 1 times)",
        f"gossamer run: rank 1 {said} (then rank 0 ended too)",
    ]


def test_torchs_own_lines_about_a_failure_are_printed_with_its_log_level_set(start, script) -> None:
    train = script("sys.exit(3)")
    _, _, err = start([*RUN, "-np", "1", train], env={"LOGLEVEL": "WARNING"}).finish()
    assert "failed (exitcode: 3) local_rank: 0" in err
    assert err.splitlines()[-1] == "gossamer run: rank 0 failed with exit code 3"


def test_threads_per_worker_share_the_cores_unless_the_user_chose(fork, script) -> None:
    train = script("print(os.environ['OMP_NUM_THREADS'])")
    code, out, err = fork([*RUN, "-np", "1", train]).finish()
    assert code == 0, err
    assert out.strip() == f"[0] {len(os.sched_getaffinity(0))}"
    assert "OMP_NUM_THREADS" not in err
    _, out, _ = fork([*RUN, "-np", "1", train], env={"OMP_NUM_THREADS": "3"}).finish()
    assert out.strip() == "[0] 3"


def test_nothing_is_left_in_the_temporary_folder(fork, script, tmp_path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code, _, err = fork([*RUN, "-np", "1", script("print(1)")], env={"TMPDIR": str(scratch)}).finish()
    assert code == 0, err
    assert [path.name for path in scratch.iterdir() if "gossamer" in path.name] == []


def test_help_shows_an_example_and_unknown_commands_the_known(capsys) -> None:
    for arguments, words in (
        (["--help"], "gossamer run -np 4"),
        (["run", "--help"], "--max-restarts 2 train.py"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        assert words in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["fly"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "run" in message
    assert "demo" in message


def test_version_needs_no_installed_metadata(start) -> None:
    code, out, _ = start(["-m", "gossamer.launch.cli", "--version"]).finish()
    assert (code, out.strip()) == (0, f"gossamer {gossamer.__version__}")


def test_run_does_not_import_the_demo(start) -> None:
    probe = "import sys\nfrom gossamer.launch import cli\nassert 'gossamer.demo' not in sys.modules"
    code, _, err = start(["-c", probe]).finish()
    assert code == 0, err


@pytest.mark.parametrize("flags", [["-np", "2"], ["-np", "2", "--min-np", "1"]], ids=["fixed", "elastic"])
def test_warnings_as_errors_find_nothing(start, tmp_path, flags) -> None:
    train = """
        import gossamer as gs, torch
        gs.init()
        wrapped = gs.DataParallel(torch.nn.Linear(2, 2))
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.close()
        gs.shutdown()
        print("done")
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(train))
    code, out, err = start([*RUN, *flags, "train.py"], env={"PYTHONWARNINGS": "error"}).finish()
    said = [
        line for line in err.splitlines() if "workers are ready; waits up to" not in line
    ]  # on a busy machine
    assert (code, said) == (0, [])
    assert sorted(out.splitlines()) == ["[0] done", "[1] done"]


def test_without_a_place_for_temporary_files_it_says_what_to_set(monkeypatch, capsys) -> None:
    def none_usable(*_) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.mkdtemp", none_usable)
    assert cli.main(["run", "-np", "1", "train.py"]) == 1
    text = "gossamer run: a folder for temporary files must be writable, got [Errno 2] No usable temporary directory"
    assert capsys.readouterr().err.startswith(text)


def test_a_deleted_working_directory_is_named_instead_of_an_abort_of_mkl(start, tmp_path) -> None:
    gone = tmp_path / "gone"
    code = f"import os; os.mkdir({str(gone)!r}); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); import gossamer"
    _, _, err = start(["-c", code]).finish()
    assert err.splitlines()[-1].startswith("ImportError: gossamer: the working directory must exist")


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.parametrize("flags", [["-np", "2"], ["-np", "2", "--min-np", "1"]], ids=["fixed", "elastic"])
def test_without_the_device_lo_the_command_that_brings_it_up_is_named(flags, tmp_path) -> None:
    command = ["unshare", "--net", sys.executable, *RUN, *flags, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "must reach its own address 127.0.0.1, got Network is unreachable" in done.stderr
    assert done.stderr.rstrip().endswith("ip link set lo up")
