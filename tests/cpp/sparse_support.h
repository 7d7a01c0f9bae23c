// What the tests of ChunkTopK on the CPU and on CUDA share: chunks of every temper, and kernels called on vectors.
#pragma once

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "sparse/sparse.h"

namespace gossamer::test {

using sparse::Format;

// Rows of `numel` values: of ordinary, equal, tiny or few values, by `temper`; the last two hold Inf and NaN.
constexpr int kSparseTempers = 7;
inline std::vector<float> sparse_values(int64_t numel, int temper, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(numel);
  for (float& v : x) {
    v = normal(random);
    if (temper == 1) v = v < 0 ? -1.5f : 1.5f;                       // ties everywhere
    if (temper == 2) v = std::round(2 * v) * 1e-39f;                 // denormal, with ties and zeros
    if (temper == 3) v = random() % 200 == 0 ? v * 1e30f : 0.0f;     // fewer than are sent
    if (temper == 4) v = std::exp(20 * v) * (v < 0 ? -1.0f : 1.0f);  // of very different magnitudes
  }
  if (temper == 5 && numel > 0) x[numel / 3] = -std::numeric_limits<float>::infinity();
  if (temper == 6 && numel > 0) x[numel - 1] = std::numeric_limits<float>::quiet_NaN();
  return x;
}

inline std::vector<Format> sparse_formats() {
  return {{4096, 64}, {32, 1}, {32, 32}, {96, 5}, {1024, 100}, {16384, 1024}, {8192, 3}};
}
inline std::vector<int64_t> sparse_sizes(const Format& format) {
  const int64_t chunk = format.chunk;
  return {0, 1, 31, chunk - 1, chunk, chunk + 1, 2 * chunk + chunk / 2 + 1};
}

}  // namespace gossamer::test
