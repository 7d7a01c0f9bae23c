// The codec interface of the Torch-free core: rows of floats <-> rows of wire bytes.
// Called through device_kernels.h and by the C++ tests; cuda.h is its twin for CUDA streams.
//
// A matrix of `rows` rows with `row_numel` elements each, `numel` elements in all, lies contiguously
// in memory. numel may be smaller than rows * row_numel: the last rows are then short or empty
// (row r holds clamp(numel - r * row_numel, 0, row_numel) elements). Every row, short or not,
// takes row_bytes(spec, row_numel) wire bytes; bytes that carry no element are written as zero,
// so equal input gives equal bytes on every device and instruction set.
// The matrix may be columns of a wider one: its rows then begin `pitch` elements apart, and `pitch` takes the place of
// row_numel in the count of row r.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"

namespace gossamer::codec {

// The number of a codec's line in codec_list.h, which defines the enumerators.
enum class Kind : int;

struct Spec {
  Kind kind;
  Dtype dtype;    // of the tensor that is encoded and decoded
  int64_t block;  // elements that share one set of statistics; 1 where there are none
  // The key of the random numbers for stochastic rounding (int8, int4); 0 rounds to nearest.
  uint64_t key = 0;
};

// A key, never 0, that differs for every combination of its arguments (but for chance, 2^-64).
uint64_t make_key(uint64_t seed, uint64_t nonce, uint64_t phase, uint64_t rank);

struct Rows {
  int64_t rows;
  int64_t row_numel;
  int64_t numel;              // from the first element on; not positive if no row has an element
  int64_t pitch = row_numel;  // from the beginning of one row to that of the next
};

// Rows of wire memory to read: contiguous from `first`, or each at its own address, such as in other ranks' memory.
struct WireRows {
  HD WireRows(const uint8_t* first) : first(first), each(nullptr) {}
  HD explicit WireRows(const uint8_t* const* each) : first(nullptr), each(each) {}
  HD const uint8_t* row(int64_t r, int64_t row_bytes) const {
    return each != nullptr ? each[r] : first + r * row_bytes;
  }
  const uint8_t* first;
  const uint8_t* const* each;  // an array on the host, also for a CUDA call, which copies it
};

// Wire bytes of one row. A multiple of 16, so that rows stay aligned; 0 for an empty row.
int64_t row_bytes(const Spec& spec, int64_t row_numel);

// Whether one set of statistics spans a whole row. reduce_encode then needs scratch.
bool has_row_statistics(const Spec& spec);

struct Kernels {
  const char* name;  // "scalar", "neon", "avx2", "avx512"

  // Random numbers depend on the key, the row's number and the element's place in the row, and on nothing else. So:
  // x[numel] of dtype `source` (spec.dtype, or accumulate_dtype(spec.dtype)) -> wire[rows * row_bytes].
  void (*encode)(const Spec& spec, Dtype source, const void* x, const Rows& rows, uint8_t* wire);

  // wire -> out[numel] of spec.dtype.
  void (*decode)(const Spec& spec, const WireRows& wire, const Rows& rows, void* out);

  // acc[row_numel] (accumulate_dtype) += the rows of `wire`, added in row order 0, 1, ...
  // The rows are the same chunk as seen by every rank: only the first `valid` elements of each row hold data.
  void (*decode_add)(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel, int64_t valid,
                     void* acc);

  // The fused middle of the two-shot: sums the rows as decode_add does (starting from zero), multiplies by `scale`, and
  // encodes the result as one row into out[row_bytes]. `scratch` holds row_numel elements of accumulate_dtype for codecs
  // whose statistics span the row; otherwise it may be null. The random numbers differ from those of every row that
  // `encode` writes with the same key.
  void (*reduce_encode)(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                        int64_t valid, double scale, uint8_t* out, void* scratch);

  // encode and reduce_encode with error feedback, which pass over memory once. spec.dtype is f32 or f64.
  // error[numel] (spec.dtype) += x[numel], whose dtype `source` accumulates in spec.dtype. The sum is encoded as `encode`
  // does. Then error holds what the wire left out, and 0 where that is not finite.
  void (*encode_with_error)(const Spec& spec, Dtype source, const void* x, void* error, const Rows& rows,
                            uint8_t* wire);
  // error[valid] += what the wire left out of the result, divided by `scale`. Random numbers are those of row 0.
  void (*reduce_encode_with_error)(const Spec& spec, const WireRows& wire, int64_t rows, int64_t row_numel,
                                   int64_t valid, double scale, uint8_t* out, void* scratch, void* error);
};

// The kernels for this machine, chosen once; `select_kernels` picks by name (tests, benchmarks) and
// returns false if this CPU or build lacks them.
const Kernels& kernels();
bool select_kernels(const char* name);
const Kernels* kernels_by_name(const char* name);  // nullptr if this CPU or build lacks them

}  // namespace gossamer::codec
