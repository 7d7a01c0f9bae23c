// Multi-tensor moves between dense tensors and one flat buffer: gather, scatter, scale; and the sum of the flat buffers
// of several ranks. Torch-free. Called by engine/ (gradients into their bucket), comm/ and device_kernels.cpp; cuda.h is
// the twin.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace gossamer::flat {

struct Segment {
  void* tensor;    // dense memory of `numel` elements, any alignment
  int64_t offset;  // where it lies in the flat buffer, in elements
  int64_t numel;
};

// flat[offset + i] = tensor[i] * scale (computed in accumulate_dtype). A tensor that already lies in its place in the flat
// buffer is scaled in place, and not touched when scale is 1. tensor == nullptr: zeros.
void gather(Dtype dtype, const Segment* segments, int64_t count, void* flat, double scale);

// tensor[i] = flat[offset + i] * scale.
void scatter(Dtype dtype, const Segment* segments, int64_t count, const void* flat, double scale);

// flat[i] *= scale.
void scale(Dtype dtype, void* flat, int64_t numel, double scale);

// The sum of `count` rows of `numel` elements each, written to every row of `outs`. Rows do not overlap, but one may be in
// both lists. `first` >= 0 differs between ranks that sum the same rows at once, and never changes the bits: devices read and
// write in an order that begins with it.
struct RowSum {
  const void* const* rows;
  int64_t count;
  void* const* outs;
  int64_t out_count;
  int64_t numel;
  int64_t first = 0;
};

// Every out becomes scale * the sum of the rows: added in their order, from zero, in accumulate_dtype, and rounded once.
// Gives the bits of the identity codec's reduce_encode.
void sum_rows(Dtype dtype, const RowSum& sum, double scale);

// A meeting of ranks on their devices. `pads[r]` is memory of rank r that all ranks map: kMeetingWords words, zeros at
// first, which only meetings change.
constexpr int kMostRanks = 72;  // that torch's symmetric memory takes
constexpr int kMeetingWords = kMostRanks + 1;
struct Meeting {
  uint32_t* const* pads;
  int rank, size;
  int64_t timeout_ms;
  // Host memory: kNoneMissing; the number of a rank that did not come in time, which the device writes; or kGivenUp, which
  // the host writes, and for which the device looks while it waits.
  int* missing;
};
constexpr int kNoneMissing = -1, kGivenUp = -2;

}  // namespace gossamer::flat
