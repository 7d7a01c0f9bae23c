// Row sizes, and the choice among the CPU kernels, which cpu_*.cpp compile for each instruction set.
#define GOSSAMER_ISA layout
#include "sparse/sparse.h"

#include "base/check.h"
#include "base/kernel_tables.h"
#include "sparse/entry.h"

namespace gossamer::sparse {

GOSSAMER_CHOOSE_KERNELS()

const DeviceKernels*& cuda_kernels() {
  static const DeviceKernels* kernels = nullptr;
  return kernels;
}

int64_t row_bytes(const Format& format, int64_t row_numel) {
  GOSSAMER_CHECK(format.chunk > 0 && format.chunk <= kMaxChunk && format.chunk % 32 == 0, ErrorKind::codec,
                 "ChunkTopK: chunk must be a multiple of 32 from 32 to ", kMaxChunk, ", got ", format.chunk);
  GOSSAMER_CHECK(format.kept > 0 && format.kept <= kMaxKept && format.kept <= format.chunk, ErrorKind::codec,
                 "ChunkTopK: k must be from 1 to ", kMaxKept, " and at most the chunk, ", format.chunk,
                 ", got ", format.kept);
  GOSSAMER_CHECK(row_numel >= 0, ErrorKind::codec, "ChunkTopK: a row must not be negative, got ", row_numel);
  return (row_numel + format.chunk - 1) / format.chunk * layout::Entry(format).bytes;
}

}  // namespace gossamer::sparse
