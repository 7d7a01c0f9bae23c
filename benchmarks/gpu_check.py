"""`make gpu-check`: builds, tests and measures on a machine with one GPU, nvcc and no network, in under 9 minutes.

Run in a copy of the repository (build/gpu-check). Every step runs, whether the others passed or not. Its output goes
to logs/, the benchmarks' lines with date and commit to results.jsonl, and a table at the end shows how each step
ended. Exit code 1 if one failed. `--rows results.jsonl` prints those lines as rows of docs/gpu-results.md instead.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

LIMIT_S = 530  # of all steps together
TORCH_FREE = ("codec", "flat", "optim")
SKIPPED = "needs a GPU and a build of gossamer with CUDA"  # what the tests say where either is missing
SANITIZED = ("EveryTemper", "LongRows", "Gather", "Optimizers")  # every shape would take a sanitizer too long


@dataclass(frozen=True)
class Step:
    """A command, and the patterns in its output that show whether it worked.

    Args:
        command: made when its turn comes, because it may name what earlier steps have built.
        must_say, must_not_say: patterns of re, searched in the output.
        excused_by: a pattern: the machine cannot do this; no failure.
    """

    name: str
    command: Callable[[], Sequence[str]]
    limit_s: float
    must_say: str = ""
    must_not_say: str = "(?!)"
    excused_by: str = "(?!)"
    environment: dict[str, str] = field(default_factory=dict)


def steps_of(root: Path) -> list[Step]:
    python, tests = sys.executable, "./gpu_tests"
    architecture = {"GOSSAMER_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": _architecture()}
    parallel = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"

    def sanitized(tool: str, clean: str) -> Step:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", tests, *SANITIZED]
        return Step(
            f"compute-sanitizer {tool}",
            lambda: command,
            100,
            must_say=clean,
            must_not_say=r"\bFAILED\b",
            excused_by="Device not supported|is not on this machine",
        )

    return [
        Step(
            "build",
            lambda: [python, "setup.py", "--quiet", "build_ext", "--inplace"],
            260,
            environment=architecture,
        ),
        Step("compile kernel tests", lambda: compile_command(root), 90),
        Step("kernel tests", lambda: [tests], 90, must_say=", 0 failed, 0 skipped"),
        Step(
            "CUDA tests, also of several ranks on one GPU",
            lambda: [python, "-m", "pytest", "-m", "gpu", "-q", "-rs", *parallel, "tests"],
            240,
            must_say=r"\d+ passed",
            must_not_say=SKIPPED,
            environment={"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
        ),
        Step("benchmarks", lambda: [python, "benchmarks/run_all.py", "--gpu"], 150),
        sanitized("memcheck", "ERROR SUMMARY: 0 errors"),
        sanitized("racecheck", r"\(0 errors, 0 warnings\)"),
    ]


def compile_command(root: Path) -> list[str]:
    """Compiles tests/cpp/cuda, and links it with the build's objects of today's Torch-free sources."""
    import torch

    kind = f"{sysconfig.get_config_var('SOABI')}-torch{torch.__version__}-cuda{torch.version.cuda}"
    sources = [path for folder in TORCH_FREE for path in sorted((root / "csrc" / folder).glob("*.c*"))]
    objects = []
    for source in sources:
        if source.suffix in (".cpp", ".cu"):
            group = source.stem if source.stem in ("cpu_avx2", "cpu_avx512") else "core"
            objects.append(root / "build" / kind / group / source.relative_to(root).with_suffix(".o"))
    folders = [f"-I{root / name}" for name in ("csrc", "tests/cpp", "tests/cpp/cuda/without_googletest")]
    programs = sorted((root / "tests/cpp/cuda").glob("test_*.cpp"))
    return ["nvcc", "-std=c++17", "-O1", *folders, *map(str, [*programs, *objects]), "-o", "gpu_tests"]


def run_step(step: Step, root: Path, left_s: float) -> tuple[str, str]:
    """How it ended ("passed", "failed: ..." or "left out: ..."), and its output, which is in logs/ too."""
    log = root / "logs" / f"{re.sub(r'[^A-Za-z]+', '-', step.name)}.log"
    log.parent.mkdir(exist_ok=True)
    limit_s = min(step.limit_s, left_s)
    if limit_s < 1:
        return "failed: no time was left for it", ""
    environment = os.environ | {"PYTHONPATH": str(root / "python")} | step.environment
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                step.command(), cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True
            )  # fmt: skip
        except FileNotFoundError as error:
            message = f"{error.filename} is not on this machine"
            return _excuse(step, message) or f"failed: {message}", message
        try:
            code: int | None = process.wait(limit_s)
        except BaseException as error:  # a timeout or Ctrl-C: its children end with it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
    text = log.read_text(errors="replace")
    if excuse := _excuse(step, text):
        return excuse, text
    if code is None:
        return f"failed: took more than {limit_s:.0f} s", text
    if code != 0:
        return f"failed: exit code {code}", text
    if not re.search(step.must_say, text):
        return f"failed: its output lacks {step.must_say!r}", text
    if found := re.search(step.must_not_say, text):
        return f"failed: its output says {found[0]!r}", text
    return "passed", text


def _excuse(step: Step, text: str) -> str:
    lines = [line for line in text.splitlines() if re.search(step.excused_by, line)]
    return f"left out: {lines[0].strip()}" if lines else ""


def run_all(steps: Sequence[Step], root: Path, *, commit: str, limit_s: float = LIMIT_S) -> int:
    """Runs every step, writes results.jsonl, prints the table; the exit code."""
    began, endings = time.monotonic(), []
    results = root / "results.jsonl"
    results.write_text("")
    for step in steps:
        print(f"gpu-check: {step.name} ...", flush=True)
        start = time.monotonic()
        ending, text = run_step(step, root, limit_s - (start - began))
        taken_s = time.monotonic() - start
        endings.append((step.name, ending, taken_s))
        if ending.startswith("failed"):
            print("\n".join(text.splitlines()[-40:]))
        print(f"gpu-check: {step.name}: {ending} ({taken_s:.0f} s)", flush=True)
        with results.open("a") as file:
            for line in text.splitlines():
                if line.startswith('{"benchmark"'):
                    row = json.loads(line) | {"date": str(date.today()), "commit": commit}
                    file.write(json.dumps(row) + "\n")
    print()
    for line in results.read_text().splitlines():
        print(figure_of(json.loads(line)))
    print()
    for name, ending, taken_s in endings:
        print(f"{taken_s:6.0f} s  {name}: {ending}")
    print(f"{time.monotonic() - began:6.0f} s  in all; figures in {results}, output in {root / 'logs'}")
    return int(any(ending.startswith("failed") for _, ending, _ in endings))


def figure_of(row: dict[str, Any]) -> str:
    """One result, formatted for docs/gpu-results.md."""
    text = f"{row['what']}: {row['value']:.4g} {row['unit']}"
    if row["baseline"] is not None:
        text += f"; {row['baseline']} {row['baseline_value']:.4g}, ratio {row['ratio']:.3g}"
    if "naive_times_as_long" in row:
        text += f"; naive takes {row['naive_times_as_long']:.3g} times as long"
    if "kernels" in row:
        text += f"; {row['kernels']}"
    if row["met"] is not None:
        sign, bound = ("at least", row["at_least"]) if row["at_most"] is None else ("at most", row["at_most"])
        text += f"; target {sign} {bound:g}: {'met' if row['met'] else 'missed'}"
    return text


def rows_of(lines: Sequence[str]) -> list[str]:
    """Rows of the table in docs/gpu-results.md."""
    rows = [json.loads(line) for line in lines if line.strip()]
    return [
        f"| {row['date']} | {row['commit']} | `{row['command']}` | {row.get('device', '')}, torch {row['torch']}: "
        f"{figure_of(row)} |"
        for row in rows
    ]


def _architecture() -> str:
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", help="what is checked; results carry it")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="print results.jsonl as rows of a table")
    options = parser.parse_args()
    if options.rows:
        print("\n".join(rows_of(options.rows.read_text().splitlines())))
        return 0
    if not options.commit:
        parser.error("--commit must name what is checked; with make: COMMIT=...")
    root = Path.cwd()
    return run_all(steps_of(root), root, commit=options.commit)


if __name__ == "__main__":
    sys.exit(main())
