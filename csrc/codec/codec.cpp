// Row sizes, and the choice among the CPU kernels, which cpu_*.cpp compile for each instruction set. Called by everyone who
// holds wire memory. The only place where a Spec is checked.
#define GOSSAMER_ISA layout
#include "codec/codec.h"

#include "base/check.h"
#include "base/kernel_tables.h"
#include "codec/codec_list.h"
#include "codec/noise.h"

namespace gossamer::layout {

int64_t row_bytes(const codec::Spec& spec, int64_t row_numel) {
  const auto body = [&](auto codec) {
    using Codec = decltype(codec);
    if (Codec::kStatistics == Statistics::block)
      GOSSAMER_CHECK(spec.block > 0 && spec.block % Codec::kBlockMultiple == 0, ErrorKind::codec,
                     "row_bytes: block must be a positive multiple of ", Codec::kBlockMultiple, ", got ",
                     spec.block);
    return bytes_of_row<Codec>(row_numel, spec.block);
  };
  switch (spec.kind) { GOSSAMER_CODECS(GOSSAMER_CASE_CODEC) }
  raise(ErrorKind::codec, "row_bytes: unknown codec kind ", static_cast<int>(spec.kind), " or dtype ",
        static_cast<int>(spec.dtype));
}

bool has_row_statistics(const codec::Spec& spec) {
  const auto body = [](auto codec) { return decltype(codec)::kStatistics == Statistics::row; };
  switch (spec.kind) { GOSSAMER_CODECS(GOSSAMER_CASE_CODEC) }
  return false;
}

}  // namespace gossamer::layout

namespace gossamer::codec {

GOSSAMER_CHOOSE_KERNELS()

int64_t row_bytes(const Spec& spec, int64_t row_numel) {
  GOSSAMER_CHECK(row_numel >= 0, ErrorKind::codec, "row_bytes: row_numel must not be negative, got ",
                 row_numel);
  return layout::row_bytes(spec, row_numel);
}

uint64_t make_key(uint64_t seed, uint64_t nonce, uint64_t phase, uint64_t rank) {
  uint64_t key = 0;
  for (uint64_t part : {seed, nonce, phase, rank}) key = layout::mix64(key ^ part);
  return key != 0 ? key : 1;
}

bool has_row_statistics(const Spec& spec) { return layout::has_row_statistics(spec); }

}  // namespace gossamer::codec
