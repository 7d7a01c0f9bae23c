// A sample of a product of cases, for builds that run it slowly: under a sanitizer or on an emulator.
#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace gossamer::test {

// All of the cases. Where CMake defines GOSSAMER_SAMPLED: one of them, by chance, each call another.
template <size_t count, class T>
std::vector<T> sampled(const T (&cases)[count]) {
#ifdef GOSSAMER_SAMPLED
  static std::minstd_rand random;
  return {cases[random() % count]};
#else
  return {cases, cases + count};
#endif
}

}  // namespace gossamer::test
