"""`make gpu-check`: builds, tests and measures on a machine with a GPU, nvcc and no network. See docs/gpu-results.md.

It works on a copy of the repository, in build/gpu-check. Every command runs, whether the others passed or not. Exit
code 1 if one failed. `--rows results.jsonl` prints results as rows of docs/gpu-results.md instead.
"""

import argparse
import filecmp
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import gpu_running
from gpu_results import Record, figure_of, rows_of
from gpu_steps import STEPS, Step, machine, missing_tools

ROOT = Path(__file__).resolve().parents[1]
TREE = Path("build/gpu-check")
COPIED = ("csrc", "python", "tests", "benchmarks", "setup.py", "pyproject.toml", "README.md")
LAST_LINES = 40  # of the output of a command that failed


def copy_tree(source: Path, target: Path) -> None:
    """Copies what differs, and removes what `source` lacks. What is alike stays untouched, so ninja finds it built."""
    wanted = {file.relative_to(source) for name in COPIED for file in files_below(source / name)}
    present = {file.relative_to(target) for name in COPIED for file in files_below(target / name)}
    for path in present - wanted:
        (target / path).unlink()
    for path in wanted:
        if path not in present or not filecmp.cmp(source / path, target / path, shallow=False):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, target / path)
            shutil.copymode(source / path, target / path)


def files_below(path: Path) -> list[Path]:
    """Returns the files of a folder, or the file itself, without what a build or Python left there."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return [file for file in files if "__pycache__" not in file.parts and not file.match("_C*.so")]


def run_all(steps: Mapping[str, Step], root: Path, record: Record, *, limit_s: float | None = None) -> int:
    """Runs the commands of the steps and prints the table. Returns the exit code."""
    began, endings = time.monotonic(), []

    def run(command: gpu_running.Command) -> None:
        print(f"gpu-check: {command.name} ...", flush=True)
        start = time.monotonic()
        left_s = None if limit_s is None else limit_s - (start - began)
        ending, text = gpu_running.run(command, root, left_s=left_s)
        if ending.startswith("failed"):
            print("\n".join(text.splitlines()[-LAST_LINES:]))
        note(command.name, ending, time.monotonic() - start)
        record.keep(command.log, text)

    def note(name: str, ending: str, taken_s: float = 0.0) -> None:
        endings.append((name, ending))
        record.say(f"{taken_s:6.0f} s  {name}: {ending}")

    for name, step in steps.items():
        try:
            for command in step(root):
                run(command)
        except Exception as error:  # the commands of this step cannot be made; the other steps may do
            note(name, f"failed: {type(error).__name__}: {error}")
    print()
    for name, ending in endings:
        print(f"{name}: {ending}")
    failed = sum(ending.startswith("failed") for _, ending in endings)
    record.say(f"{time.monotonic() - began:6.0f} s  in all; {failed} of {len(endings)} commands failed")
    record.write_archive()
    return int(failed > 0)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", help="what is checked; results carry it")
    parser.add_argument(
        "--steps", default=",".join(STEPS), help="which steps to run, in this order (%(default)s)"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="keep one archive of logs and results there"
    )
    parser.add_argument(
        "--limit-s", type=float, help="end after this time; commands that have not run then fail"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="go on without a GPU; what needs one then fails"
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="print results.jsonl as rows of a table")
    options = parser.parse_args(arguments)
    if options.rows:
        return options
    if not options.commit:
        parser.error("--commit must name what is checked; with make: COMMIT=...")
    options.steps = options.steps.split(",")
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"--steps must be some of {', '.join(STEPS)}; got {', '.join(sorted(unknown))}")
    if missing := missing_tools():
        parser.error(f"gpu-check needs {' and '.join(missing)} on PATH")
    return options


def main() -> int:
    options = parse()
    if options.rows:
        print("\n".join(rows_of(options.rows.read_text().splitlines())))
        return 0
    facts = machine(options.commit)
    if "sees the GPU" not in facts and not options.rehearse:
        print(
            f"{facts}\ngpu-check: needs a CUDA GPU and a torch that sees it ({sys.executable})",
            file=sys.stderr,
        )
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):  # then the processes of the command are killed too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    gpu_running.adopt_orphans()
    root = ROOT / TREE
    root.mkdir(parents=True, exist_ok=True)
    record = Record(root, options.results, commit=options.commit)
    record.say(facts)
    copy_tree(ROOT, root)
    # What is built already takes seconds, so a step never runs against another build than that of its sources.
    steps = {name: STEPS[name] for name in dict.fromkeys(["build", *options.steps])}
    try:
        code = run_all(steps, root, record, limit_s=options.limit_s)
    finally:
        record.write_archive()
    print("\n".join(["", *map(figure_of, record.rows())]))
    print(f"figures in {root / 'results.jsonl'}, output in {root / 'logs'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
