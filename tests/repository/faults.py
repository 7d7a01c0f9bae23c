"""Faults that a kernel may have. Each changes a text of the sources; the tests must then fail as the fault says."""

from dataclasses import dataclass
from pathlib import Path

from tests.repository.kernels import INT8

KERNELS = "csrc/codec/cuda_kernels.cuh"
LAUNCHES = "csrc/codec/cuda_launches.cuh"
PACK = "csrc/codec/cuda_pack.cuh"
FLAT = "csrc/flat/flat_cuda.cu"
SUM = "csrc/flat/sum_cuda.cu"
OPTIM = "csrc/optim/optim_cuda.cu"
EMULATED = "tests/cpp/cuda/emulator/test_emulator.cpp"

MINMAX, ONEBIT = "4, minmax_u8, MinMaxU8", "6, onebit, OneBit"
BEYOND = "AddressSanitizer: heap-buffer-overflow"
MISALIGNED = "misaligned address"
DIFFERS = r"FAILED Cuda\."


@dataclass(frozen=True)
class Fault:
    """A change of `before`, which `path` holds once, to `after`.

    Args:
        test: part of the name of the test that must fail.
        says: a pattern of re, searched in its output.
        codec: the codec whose kernels are compiled, for a file of csrc/codec.
        counted: whether the program is the one that counts bytes and launches.
    """

    name: str
    path: str
    before: str
    after: str
    test: str
    says: str
    codec: str = ""
    counted: bool = False

    def put_into(self, tree: Path) -> None:
        """Makes the change in the files of `tree`."""
        path = tree / self.path
        text = path.read_text()
        assert text.count(self.before) == 1, (
            f"{self.name}: {self.path} must hold this text once, and holds it {text.count(self.before)} times; "
            f"change the fault together with the source:\n{self.before}"
        )
        path.write_text(text.replace(self.before, self.after))


FAULTS = (
    Fault(
        "a barrier before the threads read what the warps wrote is missing",
        KERNELS,
        "of_warps[threadIdx.x / kWarp] = stats;\n    __syncthreads();",
        "of_warps[threadIdx.x / kWarp] = stats;",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        DIFFERS,
        INT8,
    ),
    Fault(
        "a barrier before the warps write for the next group is missing",
        KERNELS,
        "__syncthreads();  // wait for the readers of the previous group",
        "",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        DIFFERS,
        INT8,
    ),
    Fault(
        "only one warp comes to a barrier",
        KERNELS,
        "__syncthreads();  // wait for the readers of the previous group",
        "if (threadIdx.x < kWarp) __syncthreads();",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        "threads meet at two barriers",
        INT8,
    ),
    Fault(
        "a shared array has an element too few",
        KERNELS,
        "of_warps[kWarps];",
        "of_warps[kWarps - 1];",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        "out of bounds|insufficient space|AddressSanitizer: global-buffer-overflow",
        INT8,
    ),
    Fault(
        "a mask lacks half of the warp",
        KERNELS,
        "__shfl_xor_sync(team.mask(), words[w], offset)",
        "__shfl_xor_sync(team.mask() & 0x0000ffffu, words[w], offset)",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        r"which the mask \S+ does not name|its mask \S+ does not name it",
        INT8,
    ),
    Fault(
        "a team of eight lanes waits for the whole warp",
        KERNELS,
        "return size == kWarp ? 0xffffffffu",
        "return size <= kWarp ? 0xffffffffu",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        "waits in __shfl_xor_sync",
        INT8,
    ),
    Fault(
        "what a thread does not keep in registers is left out",
        KERNELS,
        "(std::is_same_v<Team, Lanes> && !Codec::kSummed)",
        "std::is_same_v<Team, Lanes>",
        "onebitGivesTheBytesAndValuesOfTheCpuForLongRows",
        DIFFERS,
        ONEBIT,
    ),
    Fault(
        "a shuffle is in a branch that half of the lanes take",
        PACK,
        "const unsigned next = __shfl_down_sync(0xffffffffu, words.v[0], 1);\n      if (i % 8 == 0) ",
        "unsigned next = 0;\n      if (i % 8 == 0) next = __shfl_down_sync(0xffffffffu, words.v[0], 1), ",
        "onebitGivesTheBytesAndValuesOfTheCpuForEveryTail",
        "waits in __shfl_down_sync",
        ONEBIT,
    ),
    Fault(
        "a whole pack is loaded where three elements are left",
        PACK,
        "if (left >= N && aligned) return",
        "if (left >= N - 1 && aligned) return",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        BEYOND,
        INT8,
    ),
    Fault(
        "an element is stored behind the last",
        PACK,
        "if (k < left) p[k] = pack.v[k];",
        "if (k <= left) p[k] = pack.v[k];",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        BEYOND,
        INT8,
    ),
    Fault(
        "vectors are loaded from any address",
        PACK,
        "return reinterpret_cast<uintptr_t>(p) % alignof(Pack<T>) == 0;",
        "return p != nullptr;",
        "int8GivesTheBytesAndValuesOfTheCpuForUnalignedViews",
        MISALIGNED,
        INT8,
    ),
    Fault(
        "the last chunk is as long as the others",
        KERNELS,
        "begin = index * kChunk, end = begin + kChunk < valid ? begin + kChunk : valid;",
        "begin = index * kChunk, end = begin + kChunk;",
        "minmax_u8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        BEYOND,
        MINMAX,
    ),
    Fault(
        "the padding of the header is not written",
        KERNELS,
        "if (index == 0) clear_header_padding(",
        "if (index < 0) clear_header_padding(",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        DIFFERS,
        INT8,
    ),
    Fault(
        "a block forgets how many others there are",
        KERNELS,
        "index += gridDim.x * teams)",
        "index += teams)",
        "minmax_u8GivesTheBytesAndValuesOfTheCpuForLongRows",
        DIFFERS,
        MINMAX,
    ),
    Fault(
        "a move ends one element late",
        FLAT,
        "i < count; i += kThreads) {",
        "i <= count; i += kThreads) {",
        "Gather",
        BEYOND,
    ),
    Fault(
        "vectors move where elements are aligned",
        FLAT,
        "reinterpret_cast<uintptr_t>(to)) % 16 == 0;",
        "reinterpret_cast<uintptr_t>(to)) % sizeof(T) == 0;",
        "Gather",
        MISALIGNED,
    ),
    Fault(
        "a sum has a piece too many",
        SUM,
        "i < pieces; i += step)",
        "i <= pieces; i += step)",
        "SummedRows",
        BEYOND,
    ),
    Fault(
        "rows are added in the order in which they are read",
        SUM,
        "    if (first & bit)\n",
        "    if (first < 0)\n",
        "SummedRowsHaveTheSameBits",
        DIFFERS,
    ),
    Fault(
        "a block sums what another has summed already",
        SUM,
        "int64_t{gridDim.x} * kThreads;",
        "kThreads;",
        "SummedRows",
        DIFFERS,
    ),
    Fault(
        "the last pack of an update reaches beyond its segment",
        OPTIM,
        "aligned ? count / kWidth : 0;",
        "aligned ? (count + kWidth - 1) / kWidth : 0;",
        "Optimizers",
        DIFFERS,
    ),
    Fault(
        "lanes read what other lanes write without __syncwarp between",
        EMULATED,
        "  __syncwarp();\n",
        "",
        "BeforeSyncwarp",
        r"FAILED Emulator\.",
    ),
    Fault(
        "dynamic shared memory is smaller than what the threads use",
        EMULATED,
        "results_of(count, 64 * sizeof(int))",
        "results_of(count, 63 * sizeof(int))",
        "DynamicMemory",
        BEYOND,
    ),
    Fault(
        "groups are encoded twice",
        LAUNCHES,
        "return encode(Lanes{lanes_of(layout.group, Source::kWidth)});",
        "return encode(Lanes{lanes_of(layout.group, Source::kWidth)}),\n"
        "           encode(Lanes{lanes_of(layout.group, Source::kWidth)});",
        "int8_takes_three_launches",
        "encoded.launches == 1",
        counted=True,
    ),
    Fault(
        "rows are read twice",
        KERNELS,
        "return held_[k];",
        "return load(i);",
        "int8_takes_three_launches",
        "sum.read_at_all == ",
        counted=True,
    ),
    Fault(
        "a lane reads four bytes of a row at a time",
        KERNELS,
        "? kPack : 128 / Codec::kCodeBits;",
        "? kPack : kPack;",
        "int8_takes_three_launches",
        "sum.widest_loads == ",
        counted=True,
    ),
    Fault(
        "a move is by single elements where vectors could do it",
        FLAT,
        "aligned ? count / kWidth : 0;",
        "0;",
        "a_gather_is_one_launch",
        "moved.widest_loads == kBytes / 16",
        counted=True,
    ),
)
