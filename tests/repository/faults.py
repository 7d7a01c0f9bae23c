"""Faults that a kernel may have. Each changes a text of the sources; the tests must then fail as the fault says.

A program holds many faults, of which the environment chooses one for a run. So each file is compiled once for all of
its faults.
"""

from dataclasses import dataclass
from pathlib import Path

KERNELS = "csrc/codec/cuda_kernels.cuh"
LAUNCHES = "csrc/codec/cuda_launches.cuh"
PACK = "csrc/codec/cuda_pack.cuh"
FLAT = "csrc/flat/flat_cuda.cu"
SUM = "csrc/flat/sum_cuda.cu"
OPTIM = "csrc/optim/optim_cuda.cu"
EMULATED = "tests/cpp/cuda/emulator/test_emulator.cpp"

BEYOND = "AddressSanitizer: heap-buffer-overflow"
MISALIGNED = "misaligned address"
DIFFERS = r"FAILED Cuda\."


@dataclass(frozen=True)
class Fault:
    """A change of `before`, which `path` holds once, to `after`, in which FAULT says whether the run has this fault.

    Args:
        test: part of the name of the test that must fail.
        says: a pattern of re, searched in its output.
        program: what is built with the fault: "kernels"; "traffic", which counts bytes and launches; or "emulator".
    """

    name: str
    path: str
    before: str
    after: str
    test: str
    says: str
    program: str = "kernels"

    def put_into(self, tree: Path, number: int) -> None:
        """Makes the change in the files of `tree`. A run with EMULATOR_FAULT=number has the fault."""
        path = tree / self.path
        text = path.read_text()
        assert text.count(self.before) == 1, (
            f"{self.name}: {self.path} must hold this text once, and holds it {text.count(self.before)} times; "
            f"change the fault together with the source:\n{self.before}"
        )
        path.write_text(text.replace(self.before, self.after.replace("FAULT", f"fault_is({number})")))


FAULTS = (
    Fault(
        "a barrier before the threads read what the warps wrote is missing",
        KERNELS,
        "of_warps[threadIdx.x / kWarp] = stats;\n    __syncthreads();",
        "of_warps[threadIdx.x / kWarp] = stats;\n    if (!FAULT) __syncthreads();",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        DIFFERS,
    ),
    Fault(
        "a barrier before the warps write for the next group is missing",
        KERNELS,
        "__syncthreads();  // wait for the readers of the previous group",
        "if (!FAULT) __syncthreads();  // wait for the readers of the previous group",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        DIFFERS,
    ),
    Fault(
        "only one warp comes to a barrier",
        KERNELS,
        "__syncthreads();  // wait for the readers of the previous group",
        "if (!FAULT || threadIdx.x < kWarp) __syncthreads();  // wait for the readers of the previous group",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        "threads meet at two barriers",
    ),
    Fault(
        "a shared array has an element less than what is read",
        KERNELS,
        "w < kWarps; ++w)",
        "w < kWarps + FAULT; ++w)",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        "out of bounds|insufficient space|AddressSanitizer: global-buffer-overflow",
    ),
    Fault(
        "a mask lacks half of the warp",
        KERNELS,
        "__shfl_xor_sync(team.mask(), words[w], offset)",
        "__shfl_xor_sync(team.mask() & (FAULT ? 0x0000ffffu : ~0u), words[w], offset)",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        r"which the mask \S+ does not name|its mask \S+ does not name it",
    ),
    Fault(
        "a team of four lanes waits for the whole warp",
        KERNELS,
        "return size == kWarp ? 0xffffffffu",
        "return FAULT || size == kWarp ? 0xffffffffu",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        "waits in __shfl_xor_sync",
    ),
    Fault(
        "what a thread does not keep in registers is left out",
        KERNELS,
        "for (; i < end; i += step_) body(i, [&] { return load(i); });",
        "for (; i < end && !FAULT; i += step_) body(i, [&] { return load(i); });",
        "onebitGivesTheBytesAndValuesOfTheCpuForLongRows",
        DIFFERS,
    ),
    Fault(
        "a shuffle is in a branch that half of the lanes take",
        KERNELS,
        "  for (int stage = kShared - 1; stage >= 0; --stage)\n",
        "  for (int stage = kShared - 1; stage >= 0; --stage)\n    if (!FAULT || threadIdx.x % 2 == 0)\n",
        "onebitGivesTheBytesAndValuesOfTheCpuForEveryTail",
        "waits in __shfl_xor_sync",
    ),
    Fault(
        "a whole pack is loaded where three elements are left",
        PACK,
        "if (left >= N && aligned) return",
        "if (left >= N - FAULT && aligned) return",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        BEYOND,
    ),
    Fault(
        "an element is stored behind the last",
        PACK,
        "if (k < left) p[k] = pack.v[k];",
        "if (k < left + FAULT) p[k] = pack.v[k];",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        BEYOND,
    ),
    Fault(
        "vectors are loaded from any address",
        PACK,
        "return reinterpret_cast<uintptr_t>(p) % alignof(Pack<T, N>) == 0;",
        "return FAULT || reinterpret_cast<uintptr_t>(p) % alignof(Pack<T, N>) == 0;",
        "int8GivesTheBytesAndValuesOfTheCpuForUnalignedViews",
        MISALIGNED,
    ),
    Fault(
        "the last chunk is as long as the others",
        KERNELS,
        "begin = index * kChunk, end = begin + kChunk < valid ? begin + kChunk : valid;",
        "begin = index * kChunk, end = FAULT || begin + kChunk < valid ? begin + kChunk : valid;",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        BEYOND,
    ),
    Fault(
        "the padding of the header is not written",
        KERNELS,
        "if (index == 0) clear_header_padding(",
        "if (!FAULT && index == 0) clear_header_padding(",
        "int8GivesTheBytesAndValuesOfTheCpuForEveryTail",
        DIFFERS,
    ),
    Fault(
        "a block forgets how many others there are",
        KERNELS,
        "index += gridDim.x * teams)",
        "index += (FAULT ? 1 : gridDim.x) * teams)",
        "int8GivesTheBytesAndValuesOfTheCpuForLongRows",
        DIFFERS,
    ),
    Fault(
        "a move ends one element late",
        FLAT,
        "i < count; i += kThreads) {",
        "i < count + FAULT; i += kThreads) {",
        "Gather",
        BEYOND,
    ),
    Fault(
        "vectors move where elements are aligned",
        FLAT,
        "reinterpret_cast<uintptr_t>(to)) % 16 == 0;",
        "reinterpret_cast<uintptr_t>(to)) % (FAULT ? sizeof(T) : 16) == 0;",
        "Gather",
        MISALIGNED,
    ),
    Fault(
        "a sum has a piece too many",
        SUM,
        "i < pieces; i += step)",
        "i < pieces + FAULT; i += step)",
        "SummedRows",
        BEYOND,
    ),
    Fault(
        "rows are added in the order in which they are read",
        SUM,
        "    if (first & bit)\n",
        "    if (!FAULT && (first & bit))\n",
        "SummedRowsHaveTheSameBits",
        DIFFERS,
    ),
    Fault(
        "a block sums what another has summed already",
        SUM,
        "int64_t{gridDim.x} * kThreads;",
        "(FAULT ? 1 : int64_t{gridDim.x}) * kThreads;",
        "SummedRows",
        DIFFERS,
    ),
    Fault(
        "the last pack of an update reaches beyond its segment",
        OPTIM,
        "aligned ? count / kWidth : 0;",
        "aligned ? (FAULT ? count + kWidth - 1 : count) / kWidth : 0;",
        "Optimizers",
        DIFFERS,
    ),
    Fault(
        "lanes read what other lanes write without __syncwarp between",
        EMULATED,
        "  __syncwarp();\n",
        "  if (!FAULT) __syncwarp();\n",
        "BeforeSyncwarp",
        r"FAILED Emulator\.",
        program="emulator",
    ),
    Fault(
        "dynamic shared memory is smaller than what the threads use",
        EMULATED,
        "results_of(count, 64 * sizeof(int))",
        "results_of(count, (64 - FAULT) * sizeof(int))",
        "DynamicMemory",
        BEYOND,
        program="emulator",
    ),
    Fault(
        "groups are encoded twice",
        LAUNCHES,
        "? encode(Block{}) : encode(lanes);",
        "? encode(Block{}) : encode(lanes), FAULT ? encode(lanes) : void();",
        "int8_takes_three_launches",
        "encoded.launches == 1",
        program="traffic",
    ),
    Fault(
        "rows are read twice",
        KERNELS,
        "return held_[k];",
        "return FAULT ? load(i) : held_[k];",
        "int8_takes_three_launches",
        "sum.read_at_all == ",
        program="traffic",
    ),
    Fault(
        "a lane reads four bytes of a row at a time",
        PACK,
        "    return *reinterpret_cast<const uint4*>(codes + i / N * 16);\n",
        "  {\n    const auto* words = reinterpret_cast<const unsigned*>(codes + i / N * 16);\n"
        "    if (FAULT) return uint4{words[0], words[1], words[2], words[3]};\n"
        "    return *reinterpret_cast<const uint4*>(words);\n  }\n",
        "int8_takes_three_launches",
        "sum.widest_loads == ",
        program="traffic",
    ),
    Fault(
        "a move is by single elements where vectors could do it",
        FLAT,
        "aligned ? count / kWidth : 0;",
        "aligned && !FAULT ? count / kWidth : 0;",
        "a_gather_is_one_launch",
        "moved.widest_loads == kBytes / 16",
        program="traffic",
    ),
)
