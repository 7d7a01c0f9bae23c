# What `make gpu-check` does with its steps, on a machine without a GPU: steps of our own in place of its own.

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest

from tests import ROOT

spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
gpu_check = importlib.util.module_from_spec(spec)
sys.modules["gpu_check"] = gpu_check
spec.loader.exec_module(gpu_check)

LINE = {
    "benchmark": "codec",
    "what": "encode, 64 MiB",
    "value": 3900.0,
    "unit": "GB/s moved",
    "baseline": "a copy",
}
LINE |= {
    "baseline_value": 4300.0,
    "ratio": 0.907,
    "at_least": 0.85,
    "at_most": None,
    "met": True,
    "torch": "2.11",
}
LINE |= {"commit": None, "command": "python benchmarks/bench_codec.py --gpu", "device": "GPU"}


def step(name, code, **options):
    return gpu_check.Step(name, lambda: [sys.executable, "-c", code], options.pop("limit_s", 30), **options)


def test_every_step_runs_whatever_became_of_the_others_and_the_summary_tells(tmp_path, capfd) -> None:
    steps = [
        step("fails", "raise SystemExit(3)"),
        step("hangs", "import time; print('begun', flush=True); time.sleep(60)", limit_s=1),
        gpu_check.Step("lacks", lambda: ["no-such-program"], 5),
        gpu_check.Step("excused", lambda: ["no-such-program"], 5, excused_by="is not on this machine"),
        step("says nothing", "", must_say="0 errors"),
        step("skips", "print('1 passed, 2 skipped: no GPU')", must_not_say="no GPU"),
        step("measures", f"print({json.dumps(LINE)!r})"),
    ]
    assert gpu_check.run_all(steps, tmp_path, commit="abc1234") == 1
    table = capfd.readouterr().out.split("\n\n")[-1]
    for line in (
        "fails: failed: exit code 3",
        "hangs: failed: took more than 1 s",
        "lacks: failed: no-such-program is not on this machine",
        "excused: left out: no-such-program is not on this machine",
        "says nothing: failed: its output lacks '0 errors'",
        "skips: failed: its output says 'no GPU'",
        "measures: passed",
    ):
        assert line in table
    assert (tmp_path / "logs" / "hangs.log").read_text() == "begun\n"
    (row,) = (tmp_path / "results.jsonl").read_text().splitlines()
    (markdown,) = gpu_check.rows_of([row])
    assert (
        "| abc1234 | `python benchmarks/bench_codec.py --gpu` | GPU, torch 2.11: encode, 64 MiB: " in markdown
    )
    assert "3900 GB/s moved; a copy 4300, ratio 0.907; target at least 0.85: met |" in markdown


def test_steps_end_at_the_limit_of_all_together_and_success_is_exit_code_0(tmp_path) -> None:
    slow = step("slow", "import time; time.sleep(1.5)")
    assert gpu_check.run_all([slow, slow], tmp_path, commit="a", limit_s=2.2) == 1
    assert gpu_check.run_all([step("quick", "pass")], tmp_path, commit="a") == 0


def test_results_without_a_commit_are_refused(start) -> None:
    code, _, err = start([str(ROOT / "benchmarks" / "gpu_check.py")]).finish()
    assert code == 2
    assert "--commit must name what is checked" in err


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
    assert run("Holds") == (0, "passed Some.Holds\n1 tests, 0 failed, 0 skipped\n")
    assert run("NoSuchTest")[0] == 1
