# The command `gossamer plan`: reads its arguments, asks predict.py and advice.py, and shows a table, lines or plots.
# With --measure it is one rank of a job and asks measuring.py first. It computes nothing itself.
"""The ``gossamer plan`` command."""

import argparse
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer import config, runtime
from gossamer.comm import from_group
from gossamer.errors import ConfigError
from gossamer.facts import Settings
from gossamer.planner import plots
from gossamer.planner.advice import advise
from gossamer.planner.measuring import compute_of, measure
from gossamer.planner.methods import METHODS, method_of
from gossamer.planner.network import Network
from gossamer.planner.predict import predict_all
from gossamer.planner.problem import Problem, of_module, transformer
from gossamer.planner.show import Plan, print_lines, print_table
from gossamer.planner.speeds import Speeds, defaults
from gossamer.units import parse_bytes, parse_count, parse_rate, parse_seconds

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: The flags of the network: the fields of Network that they set, the functions that read them, and their --help.
NETWORK: dict[str, tuple[str, Callable[[str], Any], str, str]] = {
    "ranks": ("ranks", parse_count, "N", "workers in all"),
    "hosts": ("hosts", parse_count, "N", "that they are on (1)"),
    "bandwidth": ("bandwidth", parse_rate, "RATE", "out of a host, such as 10gbit (10gbit)"),
    "latency": ("latency_s", parse_seconds, "TIME", "between hosts, such as 50us (50us)"),
    "local_bandwidth": ("local_bandwidth", parse_rate, "RATE", "of a rank inside its host (200gbit)"),
    "local_latency": ("local_latency_s", parse_seconds, "TIME", "inside a host (5us)"),
}
EXAMPLES = """\
examples:
  gossamer plan --params 1.2e9 --ranks 64 --hosts 8 --bandwidth 10gbit --latency 50us --compute-ms 400
                                             a made-up transformer of that many parameters
  gossamer plan --model package.models:make --ranks 4 --hosts 4 --bandwidth 100mbit --compute-ms 90 --device cpu
                                             a model of yours; make() returns it
  gossamer plan --params 7B --ranks 64 --hosts 8 --compute-ms 900 --plot plots --json
                                             two PNG files, and a line of JSON for each algorithm
  gossamer run -np 4 -m gossamer.launch.cli plan --measure
                                             measures network, codecs and a small GPT's step first; rank 0 prints
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts the step time of every algorithm on a network, and says what to use and why."
    )
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument_group("model").add_argument
    add("--params", metavar="N", help="parameters of a made-up transformer, such as 1.2e9 or 7B")
    add("--model", metavar="MODULE:FACTORY", help="a function that returns a module, or (module, inputs)")
    add("--dtype", choices=DTYPES, help="of the parameters that --params makes (float32)")
    add("--compute-ms", type=float, metavar="MS", help="a rank's step without communication")
    add("--forward", type=float, metavar="SHARE", help="of it before the backward (1/3)")
    add("--bucket-bytes", metavar="SIZE", help="such as 25MiB (GOSSAMER_BUCKET_BYTES)")
    add("--first-bucket-bytes", metavar="SIZE", help="such as 1MiB (GOSSAMER_FIRST_BUCKET_BYTES)")
    add = parser.add_argument_group("network").add_argument
    for flag, (_, _, metavar, text) in NETWORK.items():
        add(f"--{flag.replace('_', '-')}", metavar=metavar, help=text)
    add = parser.add_argument_group("machine and algorithms").add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="that codecs run on (%(default)s)")
    add("--no-peer-access", action="store_true", help="GPUs of a host do not read each other's memory")
    add("--cores", type=float, help="processor cores a rank; below 2, sending slows computing")
    add("--algorithms", nargs="+", metavar="NAME", help=f"only these of: {', '.join(METHODS)}")
    add("--period", type=int, default=32, help="steps between averagings of local_sgd (%(default)s)")
    add("--rank", type=int, default=4, help="of PowerSGD's factors (%(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--measure", action="store_true", help="inside a job: measure first")
    add("--plot", type=Path, metavar="FOLDER", help="write plan-bandwidth.png and plan-ranks.png there")
    add("--json", action="store_true", help="lines of JSON instead of the table")


def main(args: argparse.Namespace) -> int:
    """Predicts and shows. Raises ConfigError for arguments that do not parse or do not fit together."""
    names = args.algorithms or list(METHODS)
    for name in names:
        method_of(name)
    if args.plot is not None:
        plots.require_matplotlib()
    settings = Settings(args.period, args.rank)
    if args.measure:
        problem, network, what = _measured(args)
        if problem is None:
            return 0  # rank 0 prints
    else:
        problem, network, what = _given(args)
    predictions = predict_all(problem, network, names, settings=settings)
    advice = advise(problem, network, predictions)
    shown = args.algorithms or [name for name in plots.SHOWN if name in names]
    paths = plots.draw(args.plot, problem, network, shown, settings) if args.plot is not None else []
    show = print_lines if args.json else print_table
    show(Plan(what, problem, network, predictions, advice, paths))
    return 0


def _given(args: argparse.Namespace) -> tuple[Problem, Network, str]:
    for flag in ("ranks", "compute_ms"):
        if getattr(args, flag) is None:
            raise ConfigError(
                f"plan: --{flag.replace('_', '-')} must be given, unless --measure finds it out in a job"
            )
    if args.no_peer_access and args.device != "cuda":
        raise ConfigError(f"plan: --no-peer-access is of GPUs, got --device {args.device}")
    speeds = replace(defaults(args.device), peer_access=not args.no_peer_access)
    problem, what = _problem(args, args.compute_ms / 1000, speeds)
    values = {
        field: parse(getattr(args, flag))
        for flag, (field, parse, _, _) in NETWORK.items()
        if getattr(args, flag) is not None
    }
    return problem, Network(**values), what


def _problem(
    args: argparse.Namespace, compute_s: float, speeds: Speeds, *, module: nn.Module | None = None
) -> tuple[Problem, str]:
    """The model that was asked for, and what it is. `module`: it is made already."""
    if args.params is not None and args.model is not None:
        raise ConfigError("plan: --params and --model exclude each other")
    defaults_of_engine = config.current()
    sizes = {
        name: parse_bytes(getattr(args, name)) if getattr(args, name) else getattr(defaults_of_engine, name)
        for name in ("bucket_bytes", "first_bucket_bytes")
    }
    settings: dict[str, Any] = {**sizes, "speeds": speeds, "cores": args.cores or math.inf}
    if args.forward is not None:
        settings["forward"] = args.forward
    if args.params is not None:
        dtype = DTYPES[args.dtype or "float32"]
        problem, text = transformer(parse_count(args.params), compute_s, dtype=dtype, **settings)
        return problem, f"{text} (made up of --params)"
    if args.dtype is not None:
        raise ConfigError("plan: --dtype is of the parameters that --params makes; a model has its own")
    if module is None:
        if args.model is None:
            raise ConfigError(
                "plan: --params or --model must be given, unless --measure takes its own small GPT"
            )
        with torch.device("meta"):
            module, _ = _make(args.model)
    return of_module(module, compute_s, **settings), args.model or "the demo's GPT"


def _make(text: str) -> tuple[nn.Module, tuple[torch.Tensor, ...] | None]:
    """Calls MODULE:FACTORY, and returns the module and the inputs if it gives some."""
    name, _, attribute = text.partition(":")
    try:
        factory = getattr(importlib.import_module(name), attribute)
        inspect.signature(factory).bind()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"plan: --model must be MODULE:FACTORY, a function without arguments, got {text!r}: {error}"
        ) from error
    made = factory()
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"plan: {text} must return a module, or (module, inputs), got {type(made).__name__}"
        )
    return module, inputs


def _measured(args: argparse.Namespace) -> tuple[Problem | None, Network, str]:
    """Collective over the job. None as problem on all ranks but the first."""
    given = [flag for flag in NETWORK if getattr(args, flag)]
    if given:
        raise ConfigError(f"plan: --measure finds out --{given[0].replace('_', '-')}; leave it out")
    runtime.init()
    try:
        if runtime.size() == 1:
            raise ConfigError(
                "plan: --measure needs a job of 2 workers or more, such as gossamer run -np 4 -m gossamer.launch.cli "
                "plan --measure"
            )
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        comm = from_group(None, device)
        found = measure(comm)
        module, compute_s = None, (args.compute_ms or 0.0) / 1000
        if args.compute_ms is None:
            if args.params is not None:
                raise ConfigError("plan: --params has no step to measure; give --compute-ms, or --model")
            module, inputs = _make(args.model) if args.model else _demo()
            if inputs is None:
                raise ConfigError(
                    f"plan: {args.model} must return (module, inputs) to be measured; or give --compute-ms"
                )
            compute_s, share = compute_of(comm, module.to(device), [x.to(device) for x in inputs])
            args.forward = args.forward if args.forward is not None else share
        problem, what = _problem(args, compute_s, found.speeds, module=module)
        return (problem if runtime.rank() == 0 else None), found.network, f"{what}, measured"
    finally:
        runtime.shutdown()


def _demo() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from gossamer.workloads.gpt import CONTEXT, GPT

    return GPT(), (torch.randint(256, (8, CONTEXT + 1)),)
