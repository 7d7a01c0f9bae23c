"""Kills workers of an elastic run at random, many times, and prints the result as one line of JSON.

    python -m tests.launch.elastic_soak --kills 50 [--workers 3] [--seed 1] [--env HOROVOD_CPU_OPERATIONS=gloo]

Every worker may be hit at any moment, also rank 0 and workers that are just starting or joining, sometimes two at
once; one that trains is left. After each round all workers that trained and were not hit must make a step within
--patience seconds. In the end every loss of every worker must be on the curve of an undisturbed run. Exit code 1
otherwise.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests import ROOT
from tests.launch import elastic_job

STEPS = 1_000_000  # the file ends it


class Soak:
    """A run, and the lines that its workers have written so far."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.patience_s, self.size = folder, args.patience, args.workers
        self.random = random.Random(args.seed)
        self.recoveries_s: list[float] = []
        plan = {"sleep_s": 0.01, "commit_every": 3, "until": str(folder / "end")}
        flags = ["--min-np", "1", "--max-np", str(args.workers), "--blacklist-cooldown-range", "0", "0"]
        job = [elastic_job.__file__, str(folder), str(STEPS), json.dumps(plan)]
        self.log = open(folder / "log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gossamer.launch.cli", "run", *flags, *job],
            env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **dict(e.split("=", 1) for e in args.env)},
            stdout=self.log,
            stderr=self.log,
        )

    def workers(self) -> list[int]:
        """All processes of workers, also those that are starting."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # has just ended
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    def steps(self) -> dict[int, dict]:
        """The last step of each living worker that trains."""
        living, found = self.workers(), {}
        for pid, lines in elastic_job.journals(self.folder).items():
            if pid in living and (steps := [line for line in lines if "step" in line]):
                found[pid] = steps[-1]
        return found

    def wait_for_steps(self, pids: list[int], since: float) -> list[float]:
        """The time of each process's first step after `since`."""
        until = time.time() + self.patience_s
        while True:
            now = self.steps()
            late = [
                pid for pid in pids if pid in self.workers() and now.get(pid, {"time": 0})["time"] <= since
            ]
            if not late:
                return [now[pid]["time"] for pid in pids if pid in now]
            if time.time() > until or self.process.poll() is not None:
                raise AssertionError(
                    f"workers {late} have made no step for {self.patience_s} s after a kill; "
                    f"see {self.folder}/log"
                )
            time.sleep(0.05)

    def round(self) -> tuple[int, int]:
        """Kills one or two workers. Returns how many, and how many of those trained."""
        wanted = self.random.choice([2, self.size, self.size, self.size])
        until = time.time() + self.patience_s
        while len(training := self.steps()) < wanted:
            assert time.time() < until, (
                f"no {wanted} workers train after {self.patience_s} s; see {self.folder}/log"
            )
            time.sleep(0.1)
        time.sleep(self.random.choice([0.0, 0.1, 0.3, 1.0]) * self.random.random())
        training = self.steps()
        spared = self.random.choice(sorted(training))
        victims = [pid for pid in sorted(self.workers()) if pid != spared]
        victims = self.random.sample(victims, min(len(victims), self.random.choice([1, 1, 1, 2])))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed_at = time.time()
        survivors = [pid for pid in training if pid not in victims]
        # A step may have been under way: the one that counts is made in the group after.
        stepped = self.wait_for_steps(survivors, killed_at + 0.5)
        self.recoveries_s.append(max(stepped) - killed_at)
        return len(victims), len(set(victims) & set(training))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--env", action="append", default=[])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="elastic-soak-"))
    began = time.time()
    soak = Soak(folder, args)
    killed = trained = 0
    while not soak.steps():
        assert soak.process.poll() is None, (folder / "log").read_text()
        time.sleep(0.1)
    while killed < args.kills:
        count, trainers = soak.round()
        killed, trained = killed + count, trained + trainers
        print(f"{time.time() - began:.0f} s: {killed} killed", file=sys.stderr, flush=True)
    (folder / "end").touch()
    code = soak.process.wait(args.patience)
    print(json.dumps(report(soak, folder) | {"seed": args.seed, "kills": killed, "of_them_training": trained,
                     "exit_code": code, "seconds": round(time.time() - began)}))  # fmt: skip
    return code


def report(soak: Soak, folder: Path) -> dict:
    journals = elastic_job.journals(folder)
    lines = [line for journal in journals.values() for line in journal]
    steps = 1 + max(line["step"] for line in lines if "step" in line)
    worst = elastic_job.worst_deviation(folder, steps)
    assert worst < 1e-12, f"a loss is {worst} from the curve"
    return {
        "steps": steps,
        "worst_relative_deviation_of_a_loss": worst,
        "groups": max(line["group"] for line in lines if "begin" in line),
        "processes": len(journals),
        "steps_made_again": sum("step" in line for line in lines if line["rank"] == 0) - steps,
        "seconds_to_the_next_step": {
            "median": round(median(soak.recoveries_s), 2),
            "largest": round(max(soak.recoveries_s), 2),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
