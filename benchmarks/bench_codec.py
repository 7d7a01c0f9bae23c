"""The codecs' ladder: the scalar code, AVX2, AVX-512 or CUDA, torch's own operations, and a copy of as many bytes.

On the CPU: GB/s of float32 on one core, for 1 MiB in cache and for 64 MiB, which no cache holds. It is compared with
torch's quantisation, which gets its one scale as an argument. Int8 computes one scale for each block, so the line
"with aminmax" is the equal work. Codecs are called from Python through torch.ops.gossamer.*, so the dispatch and the
allocation of a call count, as they do for torch. bench_codec_native.cpp measures the kernels alone. With --gpu: 64
MiB and 1 GiB on the current CUDA device, kernels alone (CUDA graphs). `roofline` is always the share of a copy's
speed, measured in the same run: a copy that moves as many bytes, read and written together.
"""

import statistics
import warnings
from typing import Any

import torch
from harness import arguments, copy_of, paired, report

import gossamer as gs
from gossamer.bench.codec import ROWS, Bodies, native, speeds_of
from gossamer.codec import NativeCodec

MIB = 1 << 20
INT8_TARGETS = {"encode": 15.0, "decode_add": 10.0}  # GB/s with AVX2, in cache
SHARE = 0.85  # of a copy's speed, on a GPU
OPERATIONS = ("encode", "decode", "decode_add", "reduce_encode")
TORCH_QUANTIZE, TORCH_FULL = "torch.quantize_per_tensor", "torch.aminmax and quantize_per_tensor"
PAIRS = (  # ours and torch's
    ("encode", TORCH_QUANTIZE),
    ("encode", TORCH_FULL),
    ("decode_add", "torch dequantize and add_"),
    ("decode", "torch dequantize"),
    ("reduce_encode", None),
)


def torchs(x: torch.Tensor) -> Bodies:
    """By the names in PAIRS."""
    largest = x.abs().max().item()
    acc = torch.zeros_like(x[0])

    def quantize(largest: float) -> torch.Tensor:
        return torch.quantize_per_tensor(x, largest / 127, 0, torch.qint8)

    def full() -> torch.Tensor:
        low, high = torch.aminmax(x)
        return quantize(max(-low.item(), high.item()))

    quantised = quantize(largest)
    return {
        TORCH_QUANTIZE: lambda: quantize(largest),
        TORCH_FULL: full,
        "torch dequantize and add_": lambda: acc.add_(quantised.dequantize()[0]),
        "torch dequantize": lambda: quantised.dequantize(),
    }


def naive(x: torch.Tensor, block: int) -> Bodies:
    """Int8's arithmetic as a user of torch would write it: one operation for each term, on the same blocks."""
    blocks = x.view(-1, block)
    acc, out = torch.zeros_like(blocks), torch.empty_like(blocks)

    def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = values.abs().amax(1, keepdim=True).div_(127)
        return values.div(scales).round_().to(torch.int8), scales

    codes, scales = encode(blocks)
    by_row = [part.view(ROWS, -1, part.size(1)) for part in (codes, scales)]
    return {
        "encode": lambda: encode(blocks),
        "decode": lambda: torch.mul(codes, scales, out=out),
        "decode_add": lambda: acc.addcmul_(codes.float(), scales),
        "reduce_encode": lambda: encode(by_row[0].mul(by_row[1]).sum(0).div_(ROWS)),
    }


def title(codec: NativeCodec, operation: str, where: str, numel: int) -> str:
    rounding = ", stochastic" if codec.stochastic else ""
    return f"{type(codec).__name__} {operation}{rounding}, {where}, {numel * 4 // MIB} MiB of float32"


def bench_cpu(codec: NativeCodec, where: str, mib: int, *, quick: bool) -> None:
    numel = mib * MIB // 4
    x = torch.randn(1, numel)
    bodies, moved = native(codec, x)
    peers = torchs(x)
    copies = {f"copy for {name}": copy_of(count, "cpu") for name, count in moved.items()}
    # A turn in cache is shorter than a scheduler's time slice, so other work disturbs few turns instead of all.
    calls, rounds = (2, 3) if quick else (4, 81) if mib == 1 else (1, 15)
    seconds = speeds_of(bodies | peers | copies, "cpu", calls=calls, rounds=rounds)
    for name, peer in PAIRS:
        mine, copy = seconds[name], seconds[f"copy for {name}"]
        rates = [numel * 4e-9 / s for s in mine]
        judged = codec == gs.Int8() and where == "avx2" and mib == 1
        report(
            title(codec, name, where, numel),
            statistics.median(rates),
            "GB/s",
            baseline=(peer, numel * 4e-9 / statistics.median(seconds[peer])) if peer else None,
            ratio=statistics.median(paired(seconds[peer], mine)) if peer else None,
            at_least=INT8_TARGETS.get(name) if judged else None,
            samples=rates,
            **roofline(moved[name], mine, copy),
        )


def roofline(moved: int, mine: list[float], copy: list[float]) -> dict[str, Any]:
    return {
        "bytes_moved": moved,
        "copy_gb_per_s": round(moved * 1e-9 / statistics.median(copy), 2),
        "roofline": round(statistics.median(paired(copy, mine)), 3),
    }


def bench_gpu(codec: NativeCodec, mib: int, *, quick: bool) -> None:
    numel = mib * MIB // 4
    x = torch.randn(1, numel, device="cuda")
    bodies, moved = native(codec, x)
    rungs = naive(x, codec.block) if codec == gs.Int8() else {}
    others = {f"naive {name}": body for name, body in rungs.items()}
    copies = {f"copy for {name}": copy_of(count, "cuda") for name, count in moved.items()}
    calls, rounds = (
        (2, 3) if quick else (max(10, 6400 // mib), 21)
    )  # milliseconds, long enough for waiting to be negligible
    seconds = speeds_of(bodies | others | copies, "cuda", calls=calls, rounds=rounds)
    reference = cpu_reference(codec, quick=quick) if rungs else {}
    for name in OPERATIONS:
        mine, copy = seconds[name], seconds[f"copy for {name}"]
        rates = [moved[name] * 1e-9 / s for s in mine]
        more: dict[str, Any] = roofline(moved[name], mine, copy)
        if rungs:
            more["naive_times_as_long"] = round(statistics.median(paired(seconds[f"naive {name}"], mine)), 2)
            more["scalar_cpu_gb_per_s"] = reference[name]  # of the same bytes moved
        report(
            title(codec, name, torch.cuda.get_device_name(), numel),
            statistics.median(rates),
            "GB/s moved",
            baseline=("a copy of as many bytes", more["copy_gb_per_s"]),
            ratio=statistics.median(paired(copy, mine)),
            at_least=SHARE if rungs and name != "decode_add" else None,
            target_of="ratio",
            samples=rates,
            **more,
        )


def cpu_reference(codec: NativeCodec, *, quick: bool) -> dict[str, float]:
    """GB/s moved of the scalar CPU code, one thread, 16 MiB."""
    fastest = gs._C.instruction_set()
    gs._C.select_instruction_set("scalar")
    try:
        bodies, moved = native(codec, torch.randn(1, 4 * MIB))
        seconds = speeds_of(bodies, "cpu", calls=1, rounds=1 if quick else 3)
    finally:
        gs._C.select_instruction_set(fastest)
    return {name: round(moved[name] * 1e-9 / statistics.median(seconds[name]), 3) for name in bodies}


def main() -> None:
    options = arguments(__doc__, gpu="on the current CUDA device")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
    if options.gpu:
        for mib in (64, 1024):
            bench_gpu(gs.Int8(), mib, quick=options.quick)
        for codec in (gs.Int4(), gs.Int2(), gs.OneBit(), gs.MinMaxUInt8(), gs.BF16(), gs.FP16()):
            bench_gpu(codec, 1024, quick=options.quick)
        return
    default = gs._C.instruction_set()
    for instruction_set in ("neon", "avx2", "avx512", "scalar"):
        if not gs._C.select_instruction_set(instruction_set):
            continue  # this processor lacks it
        for mib in (1,) if options.quick else (1, 64):
            bench_cpu(gs.Int8(), instruction_set, mib, quick=options.quick)
    gs._C.select_instruction_set(default)
    for codec in (
        gs.Int8(stochastic=True),
        gs.Int4(),
        gs.Int4(stochastic=True),
        gs.Int2(),
        gs.OneBit(),
        gs.MinMaxUInt8(),
    ):
        bench_cpu(codec, default, 1, quick=options.quick)


if __name__ == "__main__":
    main()
