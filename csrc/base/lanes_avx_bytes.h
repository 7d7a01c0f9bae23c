// A lane of 32 bytes, which the AVX2 and the AVX-512 lane share. Included by them only.
#pragma once

#include <immintrin.h>

#include "base/lanes_steps.h"

namespace gossamer::GOSSAMER_ISA {

// first + the number of `steps` that |x| reaches, or first - it for negative x, but `last` at most: numbers that have become
// bytes.
template <int first, int last, int... steps>
HD __m256i avx_by_steps(__m256i x) {
  static constexpr StepTables<steps...> tables;
  const auto table = [](const int8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  };
  const __m256i distance = _mm256_min_epu8(_mm256_abs_epi8(x), _mm256_set1_epi8(127));
  const __m256i part = _mm256_and_si256(_mm256_srli_epi16(distance, 3), _mm256_set1_epi8(15));
  const __m256i before = _mm256_shuffle_epi8(table(tables.before), part);
  const __m256i reached = _mm256_cmpgt_epi8(distance, _mm256_shuffle_epi8(table(tables.below), part));
  const __m256i count = _mm256_sign_epi8(_mm256_sub_epi8(before, reached), x);
  return _mm256_min_epi8(_mm256_add_epi8(count, _mm256_set1_epi8(first)), _mm256_set1_epi8(last));
}

}  // namespace gossamer::GOSSAMER_ISA
