"""The demo over slow links: some steps of the same model, with every worker on a host of its own.

The hosts are network namespaces of the lab, so this needs Linux, root and iproute2. Nothing is left behind.
"""

import json
import sys
import tempfile
from pathlib import Path

from gossamer import netlab
from gossamer.demo.train import Figures
from gossamer.units import parse_rate, rate_text

STOCK = "ddp"  # the run that the others are compared with
RUNS = [STOCK, "gradient_allreduce", "bytegrad"]


def train(steps: int, *, ranks: int, rate: str, seed: int) -> dict[str, Figures]:
    """Train each of RUNS with one worker on each of ``ranks`` hosts; return the figures of each run by its name.

    A worker takes one row of text a step, because all hosts compute on the cores of this machine.

    Raises:
        ConfigError: the hosts cannot be made; ``netlab.missing()`` says so before.
        GossamerError: a worker failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "runs.json")
        job = {"runs": RUNS, "steps": steps, "rows": ranks, "seed": seed, "result": str(result)}
        job["where"] = f" at {rate_text(parse_rate(rate))}"
        command = [sys.executable, "-m", "gossamer.demo.train", json.dumps(job)]
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch warns that addresses of hosts have no names
        netlab.run_on_hosts(command, ranks, rate=rate, environment=quiet, shown=[0])
        return json.loads(result.read_text())


def speedup(runs: dict[str, Figures], name: str) -> float:
    """Returns how many times as fast as stock DDP a step of this run is."""
    return runs[STOCK]["step_ms"] / runs[name]["step_ms"]


def why_not(why: str, runs: dict[str, Figures], rate: str) -> str:
    """Returns the text to print if the hosts cannot be made: why, and the time of a step's bytes at that rate."""
    needed = [
        f"{name} {1e3 * seen['bytes_per_step'] / parse_rate(rate):,.0f} ms"
        for name, seen in runs.items()
        if seen["bytes_per_step"] >= 1000  # one process sends nothing but a few words to its group
    ]
    return (
        f"demo: not trained over links of {rate_text(parse_rate(rate))}: {why}. "
        f"There, the bytes of a step alone need: {', '.join(needed)}."
    )
