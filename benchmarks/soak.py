"""Kills workers of a plain loop under gs.elastic at random, and replays what the others did.

    python benchmarks/soak.py --kills 50 [--workers 4] [--backend gloo] [--codec int8] [--seed 1]
    python benchmarks/soak.py --kills 50 --hosts 2
    python benchmarks/soak.py --kills 90 --workers 8 --every 20 --sleep 0.2 --local '{"period": 30, "outer": true}'

Any worker may be hit at any moment, also rank 0 and workers that just start or join, sometimes two at once. One that
trains is spared. One line of JSON a round, and a summary: seconds from the kill to the first step that all survivors
made in the next group, steps lost or doubled, and the largest relative deviation of a loss from a replay in one process
of what the living members computed. In the end the launcher gets SIGTERM, and all must end with 0. Exit code 1 if
something is wrong; the folder with all journals is kept then.

With --local the workers train by gs.LocalSGD, and a step lost or doubled is an averaging. If they go by their clocks
(period_s), nothing is replayed. Then the anchors of all ranks are compared, and samples that an epoch has left out are
counted. With --deadline and --stall some workers are late in such a run.

With --rounds they train by gs.AsyncModelAverage. Then it is checked that each round has one mean, which is that of its
ranks' weights, and no rank adds a round twice.

With --hosts the workers are on network namespaces with an sshd each, equally many on each. Then workers that just start
are not hit. It needs root and openssh-server.

With --device the models are there. "late" is the simulated device of the tests, whose operations fail as NCCL's do.

With --every a worker that trains is killed so often, and another comes. The summary then has the share of its
undisturbed steps that a living worker makes: from its first step to its last, as many as a step takes before the first
kill.
"""

import argparse
import contextlib
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

import elastic_averages
import elastic_loop
import elastic_peers

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import gossamer as gs
from gossamer import netlab
from tests import ROOT
from tests.launch import sshd

EPOCHS = 1_000_000  # a signal ends it


class Soak:
    """A run, and the lines that its workers have written so far."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.patience_s, self.size = folder, args.patience, args.workers
        self.stalls_s = args.stall
        self.random, self.killed = random.Random(args.seed), set[int]()
        plan = {"sleep_s": args.sleep, "codec": args.codec, "backend": args.backend, "local": args.local}
        plan |= {
            "task": args.task,
            "rounds": args.rounds,
            "rank": args.rank,
            "adam": args.adam,
            "peers": args.peers,
        }
        plan["slow"] = {"0": args.slow}
        if args.deadline:
            plan["deadline"] = {"deadline_s": args.deadline}
        flags = ["--min-np", "1", "--max-np", str(args.workers), "--blacklist-cooldown-range", "0", "0"]
        self.ends, prefix, environment = contextlib.ExitStack(), [], dict(os.environ)
        self.far = args.hosts > 1
        if self.far:
            hosts = self.ends.enter_context(netlab.Hosts(args.hosts))
            ssh = self.ends.enter_context(sshd.Reachable(hosts, folder / "ssh"))
            listing = [f"{hosts.address(host)}:{args.workers // args.hosts}" for host in range(args.hosts)]
            flags += ["-H", ",".join(listing), "-p", str(sshd.PORT), "-i", ssh.key]
            prefix, environment = hosts.prefix(0), environment | ssh.env
        script = elastic_loop.__file__
        plan |= {
            name: given for name in ("device", "group", "sharded", "clip") if (given := getattr(args, name))
        }
        if args.device == "late":
            script = str(ROOT / "tests" / "late" / "elastic.py")
            environment["PYTHONPATH"] = str(ROOT)
        job = [script, str(folder), str(EPOCHS), json.dumps(plan)]
        self.log = open(folder / "log", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "gossamer.launch.cli", "run", *flags, *job],
            stdout=self.log,
            stderr=self.log,
            env=environment,
        )

    def living(self) -> list[int]:
        """Return the processes of workers, on one host also of those that are starting."""
        if self.far:
            begun = [own[0]["pid"] for own in elastic_loop.journals(self.folder).values() if own]
            return [pid for pid in begun if pid not in self.killed and Path(f"/proc/{pid}").exists()]
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # has just ended
            pid = int(stat.parent.name)
            if int(fields[1]) == self.process.pid and fields[0] != "Z" and pid not in self.killed:
                found.append(pid)
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
        if self.stalls_s and self.random.random() < 0.5:
            return self.stall([pid for pid in victims if pid in members])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        self.killed |= set(victims)  # some live on for a moment
        killed_at = time.time()
        seconds = 0.0
        if set(victims) & set(members):
            seconds = max(
                self.first_step_after(pid, group) - killed_at for pid in members if pid not in victims
            )
        return {"killed": len(victims), "of_them_training": len(set(victims) & set(members)), "s": seconds}

    def stall(self, victims: list[int]) -> dict[str, float]:
        """Stop workers for some time, which makes them late."""
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self.stalls_s)
        for pid in victims:
            os.kill(pid, signal.SIGCONT)
        return {"killed": 0, "of_them_training": 0, "s": 0.0, "stalled": len(victims)}

    def kill_one(self) -> dict[str, float]:
        """Kill one worker that trains, once all do."""
        members = self.wait_until_training(self.size)
        victim = self.random.choice(sorted(members))
        os.kill(victim, signal.SIGKILL)
        self.killed.add(victim)
        return {"killed": 1, "of_them_training": 0, "s": 0.0}

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


def kept(lines: dict[int, list[dict]], first_kill: float) -> float:
    """Return the share of its undisturbed steps that a living worker made after the first kill."""
    times = [[line["time"] for line in own if "step" in line] for own in lines.values()]
    quiet = [[t for t in own if t < first_kill] for own in times]
    rate = median((len(own) - 1) / (own[-1] - own[0]) for own in quiet if len(own) > 1)
    after = [[t for t in own if t >= first_kill] for own in times]
    after = [own for own in after if len(own) > 1]
    return sum(len(own) - 1 for own in after) / rate / sum(own[-1] - own[0] for own in after)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=0.01, help="seconds of a step")
    parser.add_argument("--slow", type=float, default=1.0, help="how many times longer worker 0's steps are")
    parser.add_argument("--deadline", type=float, help="deadline_s of gs.elastic")
    parser.add_argument(
        "--stall", type=float, help="with --deadline: seconds for which workers are stopped at times"
    )
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--backend")
    parser.add_argument(
        "--codec", choices=("int8", "sparse", "exact"), help="without exact only equal weights are checked"
    )
    adams = ("qadam", "onebit_adam", "zero_one_adam")
    parser.add_argument("--adam", choices=adams, help="train by it; --codec exact checks the losses too")
    parser.add_argument(
        "--peers", type=json.loads, help="arguments of gs.Decentralized as JSON, and low: true"
    )
    parser.add_argument("--local", type=json.loads, help="arguments of gs.LocalSGD as JSON, and outer: true")
    parser.add_argument("--rank", type=int, help="of gs.PowerSGD; then only equal weights are checked")
    parser.add_argument(
        "--sharded",
        type=json.loads,
        help="arguments of gs.Sharded as JSON; 3 holders survive two kills at once",
    )
    parser.add_argument("--clip", type=float, help="the norm to which gradients are clipped")
    parser.add_argument("--rounds", type=json.loads, help="arguments of gs.AsyncModelAverage as JSON")
    parser.add_argument(
        "--device", help="of the models: cuda, or late, which is the simulated device of the tests"
    )
    parser.add_argument("--group", choices=("Flat", "HostMemory", "Symmetric"), help="how sums travel")
    parser.add_argument("--every", type=float, help="seconds from a kill to the next")
    parser.add_argument("--task", help="text: a GPT, whose validation loss at the end is told")
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to train on after the last kill")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gossamer-soak-"))
    before = set(os.listdir("/dev/shm"))
    soak, rounds, first_kill = Soak(folder, args), [], 0.0
    try:
        if args.every:
            soak.wait_until_training(args.workers)
            time.sleep(args.every)
        while sum(each["killed"] for each in rounds) < args.kills:
            begun = time.time()
            first_kill = first_kill or begun
            rounds.append(soak.kill_one() if args.every else soak.round())
            time.sleep(max(0.0, begun + (args.every or 0.0) - time.time()))
            print(json.dumps(rounds[-1]), flush=True)
        soak.wait_until_training(2)
        time.sleep(args.quiet)
    finally:
        soak.process.send_signal(signal.SIGTERM)
        code = soak.process.wait(args.patience)
        soak.ends.close()
    if args.rounds:
        checked = elastic_averages.check_rounds(elastic_loop.journals(folder))
        checked |= elastic_averages.times_drawn(folder)
    elif args.local and "topology" in args.local:
        topology = gs.topology.resolve(args.local["topology"])
        exact = set(args.local) <= {"topology", "period", "outer"} and not args.task
        checked = elastic_peers.check(
            folder, topology=topology, outer=args.local.get("outer", False), exact=exact
        )
        if "period_s" in args.local:
            checked |= elastic_averages.times_drawn(folder)
    elif args.local and "period_s" in args.local:
        averagings = elastic_averages.check_anchors(elastic_loop.journals(folder))
        checked = {"averagings": averagings, "worst": 0.0} | elastic_averages.times_drawn(folder)
    elif args.local:
        exact = not (args.codec or args.task) and args.local.get("fragments", 1) == 1
        outer = args.local.get("outer", False)
        checked = elastic_averages.check(folder, period=args.local["period"], outer=outer, exact=exact)
    else:
        exact = args.codec in (None, "exact") and not (args.task or args.rank or args.peers is not None)
        exact = exact and (not args.adam or args.codec == "exact")
        apart = args.peers is not None
        checked = elastic_loop.check(folder, exact=exact, adam=args.adam, apart=apart, clip=args.clip)
    left = sorted(set(os.listdir("/dev/shm")) - before)
    seconds = [each["s"] for each in rounds if each["of_them_training"]]
    summary = {"kills": sum(each["killed"] for each in rounds), "exit_code": code, "left_in_dev_shm": left}
    summary |= checked
    if seconds:
        summary |= {"median_s": median(seconds), "worst_s": max(seconds)}
    if args.task:
        ends = [own[-1] for own in elastic_loop.journals(folder).values() if own and "saved" in own[-1]]
        summary["validation"] = median(line["validation"] for line in ends)
        summary["steps_of_a_worker"] = max(line["saved"] for line in ends)
    if args.every and rounds:
        summary["kept"] = kept(elastic_loop.journals(folder), first_kill)
    print(json.dumps(summary))
    well = not code and not left and checked["worst"] < 1e-9
    if well:
        shutil.rmtree(folder)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
