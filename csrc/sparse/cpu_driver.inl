// The kernels of sparse.h on the CPU. Included once by each cpu_*.cpp, after base/instruction_set.h. Plain loops: counting
// magnitudes above a threshold is what compilers turn into vector code by themselves. Free of std:: code: everything here is
// compiled with that file's flags.

#include <cstring>

#include "sparse/entry.h"

#if !defined(GOSSAMER_LACKS_FLAGS)
namespace gossamer::GOSSAMER_ISA {
namespace {

using sparse::Format;

constexpr int64_t kGroup = 16;  // elements that are looked at together for any that is kept

// The magnitudes of `least` or more and their places, in order. `bits` has whole groups. Returns how many there are. It does
// not branch on single elements, which no processor predicts.
int64_t gather_at_least(const int32_t* bits, int64_t count, int32_t least, int32_t* found, int32_t* place) {
  int64_t taken = 0;
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    int32_t any = 0;
    for (int64_t i = begin; i < begin + kGroup; ++i) any |= bits[i] >= least ? -1 : 0;
    if (any == 0) continue;
    for (int64_t i = begin; i < begin + kGroup; ++i) {
      found[taken] = bits[i];
      place[taken] = static_cast<int32_t>(i);
      taken += bits[i] >= least ? 1 : 0;
    }
  }
  return taken;
}

int64_t count_at_least(const int32_t* bits, int64_t count, int32_t least) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += bits[i] >= least ? 1 : 0;
  return found;
}

// Where the search for a threshold stands: fewer than wanted reach `high`; `low` is reached by more, or is 1.
struct Search {
  int32_t low, high;

  // Whether exactly `wanted` reach a threshold, which is `low` then. Goes on until no more than `enough` reach `low`.
  bool narrow(const int32_t* bits, int64_t count, int64_t wanted, int64_t enough) {
    // The largest magnitudes lie close together, so the search goes down from the largest in steps that double.
    int64_t step = int64_t{1} << 22;
    for (bool bounded = false; high - low > 1;) {
      if (step >= high - low) bounded = true;
      const int32_t tried = bounded ? low + (high - low) / 2 : static_cast<int32_t>(high - step);
      const int64_t found = count_at_least(bits, count, tried);
      bounded = bounded || found > wanted;
      step *= 2;
      (found >= wanted ? low : high) = tried;
      if (found == wanted) return true;
      if (found > wanted && found <= enough) return false;
    }
    return false;
  }
};

// Memory for a chunk: magnitudes as integers, and those that may be sent, with their places. Padded to whole groups.
struct Memory {
  alignas(64) int32_t all[sparse::kMaxChunk];
  alignas(64) int32_t some[sparse::kMaxChunk + 1];
  int32_t place[sparse::kMaxChunk + 1];
};

int64_t pad(int32_t* bits, int64_t count) {
  const int64_t padded = (count + kGroup - 1) / kGroup * kGroup;
  for (int64_t i = count; i < padded; ++i) bits[i] = 0;
  return padded;
}

// What of a chunk is sent.
struct Selection {
  int64_t count = 0;
  int32_t index[sparse::kMaxKept];
  float value[sparse::kMaxKept];

  // Of equal magnitudes at the threshold the first ones are taken. memory.all holds the magnitudes, `padded` with zeros.
  void take(const float* x, Memory& memory, int64_t padded, int32_t largest, int64_t wanted) {
    Search search{1, largest + 1};
    bool exact = search.narrow(memory.all, padded, wanted, 2 * wanted);
    const int64_t candidates = gather_at_least(memory.all, padded, search.low, memory.some, memory.place);
    const int64_t few = pad(memory.some, candidates);
    if (!exact) exact = search.narrow(memory.some, few, wanted, wanted);
    const int32_t threshold = search.low;
    int64_t equal = wanted - (exact ? 0 : count_at_least(memory.some, few, threshold + 1));
    for (int64_t c = 0; c < candidates && count < wanted; ++c) {
      const int32_t bits = memory.some[c];
      if (bits < threshold || (!exact && bits == threshold && equal-- <= 0)) continue;
      index[count] = memory.place[c];
      value[count] = x[index[count]];
      ++count;
    }
  }

  Levels levels() const {
    alignas(64) double magnitudes[sparse::kMaxKept];
    int64_t padded = 0;
    for (; padded < count || padded % kSumsAtOnce != 0; ++padded)
      magnitudes[padded] = padded < count ? bit_cast<float>(magnitude_bits(value[padded])) : 0.0f;
    return levels_of([&](double split) {
      double partial[kSumsAtOnce] = {};
      int64_t above = 0;
      for (int64_t j = 0; j < padded; j += kSumsAtOnce)
        for (int p = 0; p < kSumsAtOnce; ++p) {
          const bool is_above = magnitudes[j + p] > split;
          partial[p] += is_above ? magnitudes[j + p] : 0.0;
          above += is_above ? 1 : 0;
        }
      for (int width = kSumsAtOnce / 2; width > 0; width /= 2)
        for (int p = 0; p < width; ++p) partial[p] += partial[p + width];
      return Above{partial[0], above};
    });
  }
};

// `entry` holds zeros.
void encode_chunk(const Entry& layout, const float* x, int64_t count, Memory& memory, uint8_t* entry) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t bits = magnitude_bits(x[i]);
    memory.all[i] = bits;
    largest = bits > largest ? bits : largest;
  }
  if (largest == 0) return;
  const bool finite = static_cast<uint32_t>(largest) < kInfinityBits;
  Selection selection;
  Levels levels{};
  if (finite) {
    const int64_t wanted = layout.kept < count ? layout.kept : count;
    selection.take(x, memory, pad(memory.all, count), largest, wanted);
    levels = selection.levels();
  }
  const uint32_t header = finite ? header_of(levels) : kNanHeader;
  if (header == 0) return;  // too small for a bfloat16
  for (int b = 0; b < Entry::kHeader; ++b) entry[b] = static_cast<uint8_t>(header >> 8 * b);
  uint8_t* indices = entry + Entry::kHeader;
  uint8_t* values = indices + layout.index_bytes;
  const double split = levels.split();
  uint64_t word = 0;
  int filled = 0;
  for (int64_t j = 0; j < selection.count; ++j) {
    word |= static_cast<uint64_t>(selection.index[j]) << filled;
    for (filled += layout.index_bits; filled >= 8; filled -= 8, word >>= 8)
      *indices++ = static_cast<uint8_t>(word);
    const uint32_t bits = bit_cast<uint32_t>(selection.value[j]);
    const bool high = bit_cast<float>(bits & 0x7fffffffu) > split;
    values[j / 4] |= static_cast<uint8_t>((bits >> 31 | (high ? 2u : 0u)) << (j % 4 * 2));
  }
  if (filled > 0) *indices = static_cast<uint8_t>(word);
}

void encode(const Format& format, const float* x, int64_t rows, int64_t row_numel, uint8_t* wire) {
  const Entry layout(format);
  Memory memory;
  for (int64_t r = 0; r < rows; ++r, x += row_numel) {
    for (int64_t begin = 0; begin < row_numel; begin += format.chunk, wire += layout.bytes) {
      const int64_t left = row_numel - begin;
      memset(wire, 0, layout.bytes);
      encode_chunk(layout, x + begin, left < format.chunk ? left : format.chunk, memory, wire);
    }
  }
}

template <class Sum>
void add_entry(const Entry& layout, const uint8_t* entry, int64_t count, Sum* acc) {
  const uint32_t header = read_header(entry);
  if (header == 0) return;
  const float low = low_of(header), high = high_of(header);
  if (low != low) {
    for (int64_t i = 0; i < count; ++i) acc[i] += low;
    return;
  }
  for (int64_t slot = 0; slot < layout.kept; ++slot) {
    const int64_t index = read_index(layout, entry, slot);
    if ((slot > 0 && index == 0) || index >= count) return;
    acc[index] += read_value(layout, entry, slot, low, high);
  }
}

// Chunk by chunk, so that a chunk of the sum stays in cache while every row adds to it.
template <class Sum>
void add_rows(const Format& format, const uint8_t* wire, int64_t rows, int64_t row_numel, Sum* acc) {
  const Entry layout(format);
  const int64_t row_bytes = (row_numel + format.chunk - 1) / format.chunk * layout.bytes;
  for (int64_t begin = 0; begin < row_numel; begin += format.chunk, wire += layout.bytes) {
    const int64_t left = row_numel - begin;
    for (int64_t r = 0; r < rows; ++r)
      add_entry(layout, wire + r * row_bytes, left < format.chunk ? left : format.chunk, acc + begin);
  }
}

void decode_add(const Format& format, const uint8_t* wire, int64_t rows, int64_t row_numel, Dtype dtype,
                void* acc) {
  if (dtype == Dtype::f64)
    add_rows(format, wire, rows, row_numel, static_cast<double*>(acc));
  else
    add_rows(format, wire, rows, row_numel, static_cast<float*>(acc));
}

}  // namespace
}  // namespace gossamer::GOSSAMER_ISA
#endif

namespace gossamer::sparse {
GOSSAMER_KERNEL_TABLE(GOSSAMER_ISA::encode, GOSSAMER_ISA::decode_add);
}  // namespace gossamer::sparse
