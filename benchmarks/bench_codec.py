"""How fast the codecs are on one core: GB/s of float32 for 1 MiB in cache, against torch's quantisation.

Called from Python through torch.ops.gossamer.*, so the dispatch and the allocation of a call count, as they
do for torch, which always uses the widest instruction set that the processor has. torch.quantize_per_tensor
is told its one scale; Int8 finds one per block, so "with aminmax" is the like work. The kernels alone:
bench_codec_native.cpp. With --gpu: 256 MiB on the current CUDA device, against a plain copy.
"""

import statistics
import warnings
from collections.abc import Callable

import torch
from harness import arguments, interleaved, paired, report

import gossamer as gs
from gossamer import _ops
from gossamer.codec import NativeCodec

NUMEL = 1 << 18
GPU_NUMEL = 1 << 26
INT8_TARGETS = {"encode": 15.0, "decode_add": 10.0}  # GB/s with AVX2
TORCH_QUANTIZE, TORCH_FULL = "torch.quantize_per_tensor", "torch.aminmax and quantize_per_tensor"
PAIRS = (  # ours and torch's
    ("encode", TORCH_QUANTIZE),
    ("encode", TORCH_FULL),
    ("decode_add", "torch dequantize and add_"),
    ("decode", "torch dequantize"),
)


def bodies_of(codec: NativeCodec, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Our operations and torch's, by the names in PAIRS. x: [1, numel]."""
    kind, block, key = _ops.KINDS[codec.kind], codec.block, codec.native.key
    wire = _ops.encode(x, kind, block, key)
    acc, out = torch.zeros_like(x[0]), torch.empty_like(x)
    ours: dict[str, Callable[[], object]] = {
        "encode": lambda: _ops.encode(x, kind, block, key),
        "decode_add": lambda: _ops.decode_add(wire, kind, block, x.dtype, acc),
        "decode": lambda: _ops.decode(wire, kind, block, out),
    }
    if x.is_cuda:
        return ours | {"torch copy_": lambda: out.copy_(x)}

    def quantize(largest: float) -> torch.Tensor:
        return torch.quantize_per_tensor(x, largest / 127, 0, torch.qint8)

    def full() -> torch.Tensor:
        low, high = torch.aminmax(x)
        return quantize(max(-low.item(), high.item()))

    largest = x.abs().max().item()
    quantised = quantize(largest)
    theirs: dict[str, Callable[[], object]] = {
        TORCH_QUANTIZE: lambda: quantize(largest),
        TORCH_FULL: full,
        "torch dequantize and add_": lambda: acc.add_(quantised.dequantize()[0]),
        "torch dequantize": lambda: quantised.dequantize(),
    }
    return ours | theirs


def repeated(body: Callable[[], object], calls: int, done: Callable[[], object]) -> Callable[[], object]:
    """`calls` calls of body, then done: long enough to time."""

    def run() -> None:
        for _ in range(calls):
            body()
        done()

    return run


def bench(codec: NativeCodec, where: str, *, gpu: bool, quick: bool) -> None:
    numel = GPU_NUMEL if gpu else NUMEL
    x = torch.randn(1, numel, device="cuda" if gpu else "cpu")
    calls = 2 if quick else 40
    done = torch.cuda.synchronize if gpu else lambda: None
    bodies = {name: repeated(body, calls, done) for name, body in bodies_of(codec, x).items()}
    turns = interleaved(bodies, rounds=3 if quick else 21, repeats=1)
    speeds = {name: [numel * 4e-9 * calls / s for s in each.seconds] for name, each in turns.items()}
    for name, torch_name in PAIRS:
        if gpu and torch_name == TORCH_FULL:
            continue
        peer = "torch copy_" if gpu else torch_name
        judged = codec == gs.Int8() and where == "avx2"
        rounding = ", stochastic" if codec.stochastic else ""
        report(
            f"{type(codec).__name__} {name}{rounding}, {where}, {numel * 4 >> 20} MiB of float32",
            statistics.median(speeds[name]),
            "GB/s",
            baseline=(peer, statistics.median(speeds[peer])),
            ratio=statistics.median(paired(speeds[name], speeds[peer])),
            at_least=INT8_TARGETS.get(name) if judged else None,
            samples=speeds[name],
        )


def main() -> None:
    options = arguments(__doc__, gpu="on the current CUDA device")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
    if options.gpu:
        for codec in (gs.Int8(), gs.Int4(), gs.OneBit(), gs.MinMaxUInt8(), gs.BF16(), gs.FP16()):
            bench(codec, torch.cuda.get_device_name(), gpu=True, quick=options.quick)
        return
    default = gs._C.instruction_set()
    for instruction_set in ("avx2", "avx512", "scalar"):
        if not gs._C.select_instruction_set(instruction_set):
            continue  # this processor lacks it
        bench(gs.Int8(), instruction_set, gpu=False, quick=options.quick)
    gs._C.select_instruction_set(default)
    for codec in (
        gs.Int8(stochastic=True),
        gs.Int4(),
        gs.Int4(stochastic=True),
        gs.OneBit(),
        gs.MinMaxUInt8(),
    ):
        bench(codec, default, gpu=False, quick=options.quick)


if __name__ == "__main__":
    main()
