# `gossamer bench codec`, in one process. benchmarks/bench_codec.py times the same operations for each instruction set,
# with rooflines. bench/cli.py calls this.
"""Every codec on this machine: speed of encode, decode and decode_add, relative error, bytes per element.

GB/s count the bytes of the float32 tensor, not those of the wire. The baseline is a copy of that tensor, which takes
turns with the codecs in the same run. On the CPU one thread works, as in each worker of the engine. `relative_error` is
|out - in| / |in| over the whole tensor, after one encode and decode of normally distributed values.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from gossamer import _ops
from gossamer.bench import options as values
from gossamer.bench import showing
from gossamer.bench.measuring import as_one, copy_of, interleaved, label, paired, place, result, short
from gossamer.codec import Codec, NativeCodec
from gossamer.errors import ConfigError

EXAMPLES = """\
examples:
  gossamer bench codec                              all codecs on the CPU
  gossamer bench codec --device cuda --size 64MiB
  gossamer bench codec --codecs int8,int4 --plot codecs.png > codecs.jsonl
"""
ROWS = 4  # rows that reduce_encode sums
OPERATIONS = ("encode", "decode", "decode_add")
COLUMNS = {
    "codec": "codec",
    "encode_gb_per_s": "encode GB/s",
    "decode_gb_per_s": "decode GB/s",
    "decode_add_gb_per_s": "decode_add GB/s",
    "copy_gb_per_s": "copy GB/s",
    "bytes_per_element": "bytes/element",
    "relative_error": "relative error",
}
Bodies = dict[str, Callable[[], object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(values.CODECS)
    parser.add_argument("--codecs", default="all", help=f"all, or some of {known} (%(default)s)")
    parser.add_argument("--size", default="4MiB", help="size of the tensor (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (%(default)s)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw speed, bytes and error; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Measures, and prints a JSON line for each codec on stdout and a table on stderr. Draws if asked. Returns 0."""
    plot = values.plot_file(args.plot)
    names = values.chosen(args.codecs, list(values.CODECS), "--codecs")
    sizes = values.sizes(args.size, "--size")
    if len(sizes) != 1 or sizes[0] % (4 * ROWS):
        raise ConfigError(f"--size: must be one size, a multiple of {4 * ROWS} bytes, got {args.size!r}")
    rounds = values.at_least_one("--rounds", args.rounds)
    if args.device == "cuda" and not (_ops.with_cuda and torch.cuda.is_available()):
        raise ConfigError(
            f"--device cuda: needs a GPU and a build with CUDA, got torch.cuda.is_available() = "
            f"{torch.cuda.is_available()} and with_cuda = {_ops.with_cuda}; see `gossamer doctor`"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lines = [measure(name, sizes[0], device=args.device, rounds=rounds) for name in names]
    finally:
        torch.set_num_threads(threads)
    title = f"codecs, {label(sizes[0])} of float32, {args.device}"
    showing.results(title, COLUMNS, lines, command=args.command)
    if plot is not None:
        panels = {name: COLUMNS[name] for name in ("encode_gb_per_s", "bytes_per_element", "relative_error")}
        showing.bars(plot, lines, panels=panels, series="codec", title=title)
    return 0


def measure(name: str, nbytes: int, *, device: str, rounds: int) -> dict[str, Any]:
    """Returns the result of one codec, on normally distributed values."""
    codec = values.CODECS[name]
    x = torch.randn(1, nbytes // 4, generator=torch.Generator().manual_seed(0)).to(device)
    wire = codec.encode(x)
    apart = float((codec.decode(wire, torch.empty_like(x)) - x).norm() / x.norm())
    if isinstance(codec, NativeCodec):
        operations, _ = native(codec, x)
        bodies = {operation: operations[operation] for operation in OPERATIONS}
    else:
        bodies = of_any(codec, x)
    bodies["copy"] = copy_of(2 * nbytes, device)
    seconds = speeds_of(bodies, device, calls=1 if device == "cpu" else 10, rounds=rounds)
    rates = {operation: [nbytes * 1e-9 / s for s in seconds[operation]] for operation in bodies}
    medians = {f"{operation}_gb_per_s": short(statistics.median(rate)) for operation, rate in rates.items()}
    return (
        result(
            f"{name} encode, {label(nbytes)} of float32, {device}",
            statistics.median(rates["encode"]),
            unit="GB/s",
            benchmark="codec",
            baseline=("copy", statistics.median(rates["copy"])),
            ratio=statistics.median(paired(seconds["copy"], seconds["encode"])),
            samples=rates["encode"],
            codec=name,
            settings=repr(codec),
            nbytes=nbytes,
            wire_bytes=wire.nbytes,
            bytes_per_element=short(wire.nbytes / x.numel()),
            relative_error=short(apart),
        )
        | medians
        | place(device)
    )


def native(codec: NativeCodec, x: torch.Tensor) -> tuple[Bodies, dict[str, int]]:
    """Returns the native operations on x [1, numel], and the bytes that each must read and write."""
    kind, block, key = codec.kind, codec.block, codec.native.key
    part = x.numel() // ROWS
    wire, rows = _ops.encode(x, kind, block, key), _ops.encode(x.view(ROWS, part), kind, block, key)
    acc, out = torch.zeros_like(x[0]), torch.empty_like(x)
    bodies: Bodies = {
        "encode": lambda: _ops.encode(x, kind, block, key),
        "decode": lambda: _ops.decode(wire, kind, block, out),
        "decode_add": lambda: _ops.decode_add(wire, kind, block, x.dtype, acc),
        "reduce_encode": lambda: _ops.reduce_encode(
            rows, kind, block, dtype=x.dtype, row_numel=part, scale=1 / ROWS, key=key
        ),
    }
    moved = {
        "encode": x.nbytes + wire.nbytes,
        "decode": wire.nbytes + out.nbytes,
        "decode_add": wire.nbytes + 2 * acc.nbytes,
        "reduce_encode": rows.nbytes + rows.nbytes // ROWS,
    }
    return bodies, moved


def of_any(codec: Codec, x: torch.Tensor) -> Bodies:
    """Returns the operations of a codec written in Python, on x [1, numel]."""
    wire, acc, out = codec.encode(x), torch.zeros_like(x[0]), torch.empty_like(x)
    return {
        "encode": lambda: codec.encode(x),
        "decode": lambda: codec.decode(wire, out),
        "decode_add": lambda: codec.decode_add(wire, acc),
    }


def speeds_of(bodies: Bodies, device: str, *, calls: int, rounds: int) -> dict[str, list[float]]:
    """Returns the mean seconds of a call in each turn of `calls` calls."""
    timed = {name: as_one(body, calls, device) for name, body in bodies.items()}
    turns = interleaved(timed, rounds=rounds, repeats=1)
    return {name: [s / calls for s in each.seconds] for name, each in turns.items()}
