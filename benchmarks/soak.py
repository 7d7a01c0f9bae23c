"""Kills workers of a plain loop under gs.elastic at random, and replays what the others did.

    python benchmarks/soak.py --kills 50 [--workers 4] [--backend gloo] [--codec] [--seed 1]

Any worker may be hit at any moment, also rank 0 and workers that just start or join, sometimes two at once. One that
trains is spared. One line of JSON a round, and a summary: seconds from the kill to the first step that all survivors
made in the next group, steps lost or doubled, and the largest relative deviation of a loss from a replay in one process
of what the living members computed. In the end the launcher gets SIGTERM, and all must end with 0. Exit code 1 if
something is wrong; the folder with all journals is kept then.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import elastic_loop

EPOCHS = 1_000_000  # a signal ends it


class Soak:
    """A run, and the lines that its workers have written so far."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.patience_s, self.size = folder, args.patience, args.workers
        self.random = random.Random(args.seed)
        plan = {"sleep_s": args.sleep, "codec": args.codec, "backend": args.backend}
        flags = ["--min-np", "1", "--max-np", str(args.workers), "--blacklist-cooldown-range", "0", "0"]
        job = [elastic_loop.__file__, str(folder), str(EPOCHS), json.dumps(plan)]
        self.log = open(folder / "log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gossamer.launch.cli", "run", *flags, *job],
            stdout=self.log,
            stderr=self.log,
        )

    def living(self) -> list[int]:
        """Return the processes of workers, also of those that are starting."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # has just ended
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    def steps(self) -> dict[int, list[dict]]:
        """Return the last steps of each living worker that trains, by its process."""
        living, found = self.living(), {}
        for own in elastic_loop.journals(self.folder).values():
            steps = [line for line in own if "step" in line]
            if steps and own[0]["pid"] in living:
                found[own[0]["pid"]] = steps
        return found

    def wait_until_training(self, count: int) -> dict[int, list[dict]]:
        """Wait until so many workers are in one group."""
        until = time.time() + self.patience_s
        while True:
            steps = self.steps()
            newest = max((own[-1]["group"] for own in steps.values()), default=0)
            members = {pid: own for pid, own in steps.items() if own[-1]["group"] == newest}
            if len(members) >= count:
                return members
            assert self.process.poll() is None, f"the run has ended; see {self.folder}/log"
            assert time.time() < until, f"no {count} workers train after {self.patience_s} s: {self.folder}"
            time.sleep(0.1)

    def round(self) -> dict[str, float]:
        """Kill one or two workers, and wait until the others have made a step in another group."""
        members = self.wait_until_training(self.random.choice([2, self.size, self.size, self.size]))
        time.sleep(self.random.random() * self.random.choice([0.0, 0.1, 0.3, 1.0]))
        group = max(own[-1]["group"] for own in members.values())
        spared = self.random.choice(sorted(members))
        others = [pid for pid in sorted(self.living()) if pid != spared]
        victims = self.random.sample(others, min(len(others), self.random.choice([1, 1, 1, 2])))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed_at = time.time()
        seconds = 0.0
        if set(victims) & set(members):
            seconds = max(
                self.first_step_after(pid, group) - killed_at for pid in members if pid not in victims
            )
        return {"killed": len(victims), "of_them_training": len(set(victims) & set(members)), "s": seconds}

    def first_step_after(self, pid: int, group: int) -> float:
        """Return the time of a worker's first step in a later group."""
        until = time.time() + self.patience_s
        while True:
            after = [line for line in self.steps().get(pid, ()) if line["group"] > group]
            if after:
                return after[0]["time"]
            assert self.process.poll() is None, f"the run has ended; see {self.folder}/log"
            assert time.time() < until, (
                f"process {pid} makes no step after {self.patience_s} s: {self.folder}"
            )
            time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=0.01, help="seconds of a step")
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--backend")
    parser.add_argument(
        "--codec", action="store_true", help="8-bit gradients; only equal weights are checked"
    )
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gossamer-soak-"))
    before = set(os.listdir("/dev/shm"))
    soak, rounds = Soak(folder, args), []
    try:
        while sum(each["killed"] for each in rounds) < args.kills:
            rounds.append(soak.round())
            print(json.dumps(rounds[-1]), flush=True)
        soak.wait_until_training(2)
    finally:
        soak.process.send_signal(signal.SIGTERM)
        code = soak.process.wait(args.patience)
    checked = elastic_loop.check(folder, exact=not args.codec)
    left = sorted(set(os.listdir("/dev/shm")) - before)
    seconds = [each["s"] for each in rounds if each["of_them_training"]]
    summary = {"kills": sum(each["killed"] for each in rounds), "exit_code": code, "left_in_dev_shm": left}
    summary |= checked | {"median_s": median(seconds), "worst_s": max(seconds)}
    print(json.dumps(summary))
    well = not code and not left and checked["worst"] < 1e-9
    if well:
        shutil.rmtree(folder)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
