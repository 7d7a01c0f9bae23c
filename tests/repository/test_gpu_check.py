# What `make gpu-check` does, on a machine without a GPU: with commands of our own in place of its own, and with its own
# under a stand-in for nvidia-smi.

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests import ROOT

FOLDER = ROOT / "benchmarks"
CHECK = FOLDER / "gpu_check.py"
LINE = {"benchmark": "codec", "what": "encode, 64 MiB", "value": 3900.0, "unit": "GB/s moved"}
LINE |= {"baseline": "a copy", "baseline_value": 4300.0, "ratio": 0.907}
LINE |= {"at_least": 0.85, "at_most": None, "met": True, "torch": "2.11"}
LINE |= {"commit": None, "command": "python benchmarks/bench_codec.py --gpu", "device": "GPU"}

# Runs steps of a test as gpu_check.py runs its own: in a process of their own, because it kills its descendants.
RUNNER = f"""
import json, sys
sys.path.insert(0, {str(FOLDER)!r})
from pathlib import Path
import gpu_check, gpu_running
from gpu_results import Record
from gpu_running import Command

def python(name, code, *arguments, **options):
    return Command(name, [sys.executable, "-c", code, *arguments], options.pop("limit_s", 30), **options)

gpu_running.adopt_orphans()
gpu_running.GRACE_S = 0.2
root, line = Path(sys.argv[1]), json.loads(sys.argv[2])
record = Record(root, root / "results", commit="abc1234")
"""


def run_steps(start, folder, text, *, env=None):
    """Returns the exit code and the output of RUNNER with `text`, which defines `steps` and may set `limit_s`."""
    end = "\nsys.exit(gpu_check.run_all(steps, root, record, limit_s=globals().get('limit_s')))\n"
    running = start(["-c", RUNNER + text + end, str(folder), json.dumps(LINE)], env=env)
    code, out, err = running.finish()
    assert "Traceback" not in err, err
    return code, out


STEPS = """
def first(root):
    yield python("fails", "raise SystemExit(3)")
    yield python("hangs", "import time; print('begun', flush=True); time.sleep(60)", limit_s=1)
    yield Command("lacks", ["no-such-program"], 5)
    yield Command("is excused", ["no-such-program"], 5, excused_by="is not on this machine")
    yield python("says nothing", "", must_say="0 errors")
    yield python("skips", "print('1 passed, 2 skipped: no GPU')", must_not_say="no GPU")

def second(root):
    raise OSError("there is no program")
    yield

def third(root):
    yield python("measures", f"print({json.dumps(line)!r})")

steps = {"first": first, "second": second, "third": third}
"""


def test_every_command_runs_whatever_became_of_the_others_and_the_archive_has_it_all(start, tmp_path) -> None:
    code, out = run_steps(start, tmp_path, STEPS)
    assert code == 1
    endings = [
        "fails: failed: exit code 3",
        "hangs: failed: took more than 1 s",
        "lacks: failed: no-such-program is not on this machine",
        "is excused: left out: no-such-program is not on this machine",
        "says nothing: failed: its output lacks '0 errors'",
        "skips: failed: its output says 'no GPU'",
        "second: failed: OSError: there is no program",
        "measures: passed",
    ]
    assert "\n".join(endings) in out
    with tarfile.open(tmp_path / "results" / "gpu-check.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    kept = tmp_path / "unpacked" / "gpu-check"
    assert (kept / "logs" / "hangs.log").read_text() == "begun\n"
    summary = (kept / "summary.txt").read_text()
    assert [line.split("s  ", 1)[1] for line in summary.splitlines()[:-1]] == endings
    assert summary.endswith("in all; 6 of 8 commands failed\n")
    rows = subprocess.run(
        [sys.executable, CHECK, "--rows", kept / "results.jsonl"], capture_output=True, text=True, check=True
    )
    assert (
        "| abc1234 | `python benchmarks/bench_codec.py --gpu` | GPU, torch 2.11: encode, 64 MiB: "
        in rows.stdout
    )
    assert "3900 GB/s moved; a copy 4300, ratio 0.907; target at least 0.85: met |" in rows.stdout


CUT = """
def step(root):
    yield python("measures", f"print({json.dumps(line)!r})")
    yield python("waits", "import time; print('waits', flush=True); time.sleep(60)")
    yield python("never runs", "")

steps = {"step": step}
"""


def test_a_run_that_is_killed_keeps_what_it_had(start, tmp_path) -> None:
    end = "\ngpu_check.run_all(steps, root, record)\n"
    running = start(["-c", RUNNER + CUT + end, str(tmp_path), json.dumps(LINE)])
    log = tmp_path / "logs" / "waits.log"
    until = time.monotonic() + 60
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    running.process.kill()
    running.finish()
    with tarfile.open(tmp_path / "results" / "gpu-check.tar.gz") as archive:
        assert "measures: passed" in archive.extractfile("gpu-check/summary.txt").read().decode()
        assert json.loads(archive.extractfile("gpu-check/results.jsonl").read())["commit"] == "abc1234"


def test_commands_end_at_the_limit_of_all_together_and_a_later_run_replaces_results(start, tmp_path) -> None:
    code, out = run_steps(start, tmp_path, CUT + "\nlimit_s = 2.0\n")
    assert code == 1
    assert "waits: failed: took more than 2 s\nnever runs: failed: no time was left for it\n" in out
    again = 'steps = {"step": lambda root: [python("measures", f"print({json.dumps(line)!r})")]}'
    assert run_steps(start, tmp_path, again)[0] == 0
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1


# A command whose grandchild has a session of its own and ignores signals, as a hung rank of a launcher may.
ESCAPES = '''
child = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    print(os.getpid(), flush=True)
    signal.pause()
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
if sys.argv[2] == "hangs":
    signal.pause()
"""

def step(root):
    yield python("hangs", child, child, "hangs", limit_s=1.5)
    yield python("ends", child + "\\nimport time; time.sleep(0.5)", child, "ends")
    yield python("next", "print('fine')", must_say="fine")

steps = {"step": step}
'''


def test_no_process_of_a_command_is_left_when_the_next_one_begins(start, tmp_path) -> None:
    code, out = run_steps(start, tmp_path, ESCAPES)
    assert code == 1
    assert "hangs: failed: took more than 2 s\nends: passed\nnext: passed\n" in out
    for name in ("hangs", "ends"):
        pid = int((tmp_path / "logs" / f"{name}.log").read_text())
        assert not Path(f"/proc/{pid}").exists()


SMI = """#!/bin/sh
case "$1" in
  --query-gpu=compute_cap) echo 9.0 ;;
  --query-gpu=*) echo "Some GPU, 580.65, 345 MHz, 1980 MHz, 2619 MHz, 700.00 W, 81559 MiB" ;;
  *) cat "$OTHERS" ;;
esac
"""
ALONE = """
gpu_running.OTHERS_S = 1.0
steps = {"bench": lambda root: [python("measures", "print('ran')", alone=True)]}
"""


TORCH = """
import os
from types import SimpleNamespace as N
__version__ = "2.11.0+cu130"
cuda = N(is_available=lambda: "BLIND" not in os.environ, nccl=N(version=lambda: (2, 28, 9)))
distributed = N(is_nccl_available=lambda: True)
"""


@pytest.fixture
def machine(tmp_path) -> dict[str, str]:
    """The environment of a machine with stand-ins for nvidia-smi, nvcc and torch. Its GPU hides if $BLIND is set.

    The file $OTHERS has the compute processes.
    """
    (tmp_path / "stand_ins").mkdir()
    (tmp_path / "stand_ins" / "torch.py").write_text(TORCH)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(SMI)
    (tools / "nvcc").write_text('#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    others = tmp_path / "others"
    others.touch()
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "OTHERS": str(others),
        "PYTHONPATH": str(tmp_path / "stand_ins"),
    }


def test_benchmarks_refuse_to_run_beside_other_compute_processes(start, tmp_path, machine) -> None:
    assert run_steps(start, tmp_path, ALONE, env=machine)[0] == 0
    Path(machine["OTHERS"]).write_text("4711, python3, 512 MiB\n")
    code, out = run_steps(start, tmp_path, ALONE, env=machine)
    assert code == 1
    assert "measures: failed: it must be alone on the GPU, but there is 4711, python3, 512 MiB\n" in out
    assert (tmp_path / "logs" / "measures.log").read_text() == "there is 4711, python3, 512 MiB\n"


# It stands in for pytest: a test prints itself.
PYTEST = "import sys; print(open(sys.argv[-1]).read())"
STUBS = {
    "setup.py": "print('built')",
    "benchmarks/bench_codec.py": f"print({json.dumps(LINE)!r})",
    "tests/gpu/test_symmetric.py": "@pytest.mark.gpu\n1 skipped: no CUDA device\n",
    "tests/gpu/test_nccl.py": "@pytest.mark.gpu\n1 passed\n",
    "tests/gpu/test_equal_bytes.py": "@pytest.mark.gpu\n1 passed\n",
    "tests/cpp/cuda/test_cuda.cpp": "",
    "csrc/codec.h": "",
    "tests/codec/test_codecs.py": "marks = 'pytest.mark.gpu'",
    "pyproject.toml": "",
    "python/pytest.py": PYTEST,
    "README.md": "",
    "python/gossamer/__init__.py": "",
}
GPU_TESTS = """#!/bin/sh
if [ "$1" = --list ]; then echo Cuda.One; echo Cuda.TwoForEveryShape; exit; fi
echo "passed $1"; echo "1 tests, 0 failed, 0 skipped"
"""


def test_its_own_steps_come_in_order_and_each_can_run_alone(start, tmp_path, machine) -> None:
    tree = tmp_path / "repository"
    shutil.copytree(
        FOLDER, tree / "benchmarks", ignore=lambda _, names: [n for n in names if not n.startswith("gpu_")]
    )
    for name, text in STUBS.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    build = tree / "build" / "gpu-check" / "build"
    (build / "core").mkdir(parents=True)
    (build / "core" / "codec.o").touch()
    (build / "torch-cuda-python.ninja").write_text("build build/core/codec.o: cxx csrc/codec.cpp\n")
    compiled = Path(machine["PATH"].split(":")[0]) / "nvcc"
    compiled.write_text(
        compiled.read_text()
        + f"[ $# -gt 1 ] && cat > gpu_tests <<'END' && chmod +x gpu_tests\n{GPU_TESTS}END\ntrue\n"
    )

    def check(*options, **variables):
        arguments = [str(tree / "benchmarks" / "gpu_check.py"), "--commit", "abc1234", *options]
        return start(arguments, env=machine | variables).finish()

    code, _, err = check(BLIND="1")
    assert code == 1
    assert "needs a CUDA GPU and a torch that sees it" in err
    code, out, err = check("--results", str(tmp_path / "results"))
    assert code == 1, err
    first, *_ = out.splitlines()
    assert first.startswith("gpu-check: commit abc1234; GPU (name, driver, ")
    assert "Some GPU, 580.65, 345 MHz, 1980 MHz, 2619 MHz, 700.00 W, 81559 MiB; nvcc 13.0; " in first
    assert "; torch 2.11.0+cu130 with NCCL 2.28.9; sees the GPU; Python 3." in first
    *table, in_all = out.split("\n\n")[-2].splitlines()
    assert in_all.endswith("s  in all; 5 of 15 commands failed")
    endings = dict(line.split(": ", 1) for line in table)
    no_sanitizer = "left out: compute-sanitizer is not on this machine"
    assert list(endings.items()) == [
        ("build extension", "passed"),
        ("build kernel tests", "passed"),
        ("kernels Cuda.One", "passed"),
        ("kernels Cuda.TwoForEveryShape", "passed"),
        ("bench codec", "passed"),
        *[(f"bench {name}", "failed: exit code 2") for name in ("flat", "optim", "step")],
        ("pytest tests/gpu/test_equal_bytes.py", "passed"),
        ("pytest tests/gpu/test_symmetric.py", endings["pytest tests/gpu/test_symmetric.py"]),
        ("bench symmetric", "failed: exit code 2"),
        ("pytest tests/gpu/test_nccl.py", "passed"),
        *[(f"sanitizer {tool} Cuda.One", no_sanitizer) for tool in ("memcheck", "racecheck", "synccheck")],
    ]
    assert endings["pytest tests/gpu/test_symmetric.py"].startswith("failed: its output lacks")
    code, out, err = check("--rehearse", "--steps", "nccl", BLIND="1")
    assert code == 0, out + err
    assert "\nbuild extension: passed\npytest tests/gpu/test_nccl.py: passed\n" in out


def test_what_is_alike_stays_untouched_in_the_copy(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from gpu_check import copy_tree

    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("csrc/a.cpp", "csrc/b.cpp", "python/gossamer/_C.so", "setup.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    copy_tree(source, target)
    (target / "python/gossamer").mkdir(parents=True)
    (target / "python/gossamer/_C.so").write_text("built there")
    for name in ("csrc/a.cpp", "csrc/b.cpp"):
        os.utime(target / name, (1, 1))
    (source / "csrc/b.cpp").write_text("other")
    os.utime(source / "csrc/a.cpp")
    (source / "setup.py").unlink()
    copy_tree(source, target)
    assert (target / "csrc/a.cpp").stat().st_mtime == 1
    assert (target / "csrc/b.cpp").read_text() == "other"
    assert (target / "csrc/b.cpp").stat().st_mtime > 1
    assert (target / "python/gossamer/_C.so").read_text() == "built there"
    assert not (target / "setup.py").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--commit must name what is checked"),
        (
            ["--commit", "a", "--steps", "build,walk"],
            "--steps must be some of build, rules, kernels, bench, ranks, ",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(start, arguments, words) -> None:
    code, _, err = start([str(CHECK), *arguments]).finish()
    assert code == 2
    assert words in err


PROGRAM = """
#include <gtest/gtest.h>
namespace {
class Some : public testing::Test {
 protected:
  void SetUp() override { if (skip) GTEST_SKIP() << "for the reason " << 3; }
  static bool skip;
};
bool Some::skip = false;
TEST_F(Some, Holds) { EXPECT_EQ(1, 1); ASSERT_EQ(2, 2) << "unseen"; }
void inner(int x) { ASSERT_TRUE(x == 2) << "x is " << x; std::printf("after %d\\n", x); }
TEST_F(Some, FailsTwice) { EXPECT_EQ(1 + 1, 3); inner(2); inner(5); skip = true; }
TEST_F(Some, Skips) { ASSERT_TRUE(false); }
}
"""


def test_the_stand_in_for_googletest_finds_what_fails(tmp_path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "test.cpp").write_text(PROGRAM)
    folder = ROOT / "tests" / "cpp" / "cuda" / "without_googletest"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{folder}"]
    subprocess.run([compiler, *flags, "test.cpp", "-o", "test"], cwd=tmp_path, check=True)

    def run(*names):
        done = subprocess.run([tmp_path / "test", *names], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    code, out = run()
    assert code == 1
    assert "1 + 1 == 3" in out
    assert "x == 2 x is 5" in out
    assert "after 2\n" in out
    assert "after 5" not in out
    assert "for the reason 3\nSKIPPED Some.Skips" in out
    assert out.endswith("3 tests, 1 failed, 1 skipped\n")
    assert run("--list") == (0, "Some.Holds\nSome.FailsTwice\nSome.Skips\n")
    assert run("Holds") == (0, "passed Some.Holds\n1 tests, 0 failed, 0 skipped\n")
    assert run("NoSuchTest")[0] == 1
