// ChunkTopK against a plain reference that sorts: which elements are sent, their levels, equal bytes on every instruction
// set, and sums of rows.
#include "sparse/sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "sparse_support.h"

namespace gossamer::test {
namespace {

using Wire = std::vector<uint8_t>;

std::vector<const sparse::Kernels*> all_sparse_kernels() {
  std::vector<const sparse::Kernels*> found;
  for (const char* name : {"scalar", "neon", "avx2", "avx512"})
    if (const auto* kernels = sparse::kernels_by_name(name)) found.push_back(kernels);
  return found;
}

// Places of the elements that a chunk sends, by sorting: the largest first, of equal ones the first.
std::vector<int64_t> sent_of(const float* x, int64_t count, int64_t kept) {
  std::vector<int64_t> places(count);
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(),
                   [&](int64_t a, int64_t b) { return std::fabs(x[a]) > std::fabs(x[b]); });
  places.resize(std::min(kept, count));
  while (!places.empty() && x[places.back()] == 0) places.pop_back();
  std::sort(places.begin(), places.end());
  return places;
}

TEST(Sparse, AnEntryOf4096ElementsTakes116Bytes) {
  EXPECT_EQ(sparse::row_bytes({4096, 64}, 4096), 116);
  EXPECT_EQ(sparse::row_bytes({4096, 64}, 4097), 232);
  EXPECT_EQ(sparse::row_bytes({4096, 64}, 0), 0);
  EXPECT_EQ(sparse::row_bytes({32, 1}, 32), 4 + 1 + 1);
}

TEST(Sparse, EveryInstructionSetSendsTheLargestAndTheFirstOfEqualOnes) {
  for (const Format& format : sparse_formats())
    for (int64_t numel : sparse_sizes(format))
      for (int temper = 0; temper < kSparseTempers; ++temper) {
        const std::string where = "chunk " + std::to_string(format.chunk) + " k " +
                                  std::to_string(format.kept) + " numel " + std::to_string(numel) +
                                  " temper " + std::to_string(temper);
        const auto x = sparse_values(numel, temper, 7);
        Wire first;
        for (const auto* kernels : all_sparse_kernels()) {
          Wire wire(sparse::row_bytes(format, numel), 0xab);
          kernels->encode(format, x.data(), 1, numel, wire.data());
          if (first.empty()) first = wire;
          ASSERT_EQ(wire, first) << where << " " << kernels->name;
          std::vector<double> decoded(numel, 0.0);
          kernels->decode_add(format, wire.data(), 1, numel, Dtype::f64, decoded.data());
          for (int64_t begin = 0; begin < numel; begin += format.chunk) {
            const int64_t count = std::min(format.chunk, numel - begin);
            const float* chunk = x.data() + begin;
            const bool finite = std::all_of(chunk, chunk + count, [](float v) { return std::isfinite(v); });
            std::vector<int64_t> found;
            double least = INFINITY, most = 0;
            for (int64_t i = 0; i < count; ++i) {
              const double value = decoded[begin + i];
              if (!finite) {
                ASSERT_TRUE(std::isnan(value)) << where;
                continue;
              }
              if (value == 0) continue;
              found.push_back(i);
              ASSERT_EQ(value < 0, chunk[i] < 0) << where << " element " << begin + i;
            }
            if (!finite) continue;
            ASSERT_EQ(found, sent_of(chunk, count, format.kept)) << where << " " << kernels->name;
            double low = INFINITY, high = 0;
            for (int64_t i : found) {
              least = std::min(least, std::fabs(static_cast<double>(chunk[i])));
              most = std::max(most, std::fabs(static_cast<double>(chunk[i])));
              low = std::min(low, std::fabs(decoded[begin + i]));
              high = std::max(high, std::fabs(decoded[begin + i]));
            }
            if (temper == 2 || found.empty()) continue;  // bfloat16 has few digits there
            EXPECT_GE(low, least * (1 - 1.0 / 250)) << where;
            EXPECT_LE(high, most * (1 + 1.0 / 250)) << where;
            for (int64_t i : found) {
              const double sent = std::fabs(decoded[begin + i]), value = std::fabs(chunk[i]);
              ASSERT_TRUE(sent == low || sent == high) << where;
              EXPECT_LE(std::fabs(value - sent),
                        std::min(std::fabs(high - value), std::fabs(value - low)) + high / 100)
                  << where;
            }
          }
        }
      }
}

TEST(Sparse, SumsOfRowsAreThoseOfDecodedRowsInOrder) {
  const Format format{96, 5};
  const int64_t numel = 250, rows = 3, bytes = sparse::row_bytes(format, numel);
  const auto x = sparse_values(rows * numel, 0, 11);
  for (const auto* kernels : all_sparse_kernels()) {
    Wire wire(rows * bytes);
    kernels->encode(format, x.data(), rows, numel, wire.data());
    std::vector<float> acc(numel, 0.25f), expected = acc;
    kernels->decode_add(format, wire.data(), rows, numel, Dtype::f32, acc.data());
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<float> row(numel, 0.0f);
      kernels->decode_add(format, wire.data() + r * bytes, 1, numel, Dtype::f32, row.data());
      for (int64_t i = 0; i < numel; ++i) expected[i] += row[i];
    }
    ASSERT_EQ(acc, expected) << kernels->name;
  }
}

TEST(Sparse, WrongBytesWriteNowhereOutsideTheirChunk) {
  const Format format{96, 5};
  const Wire wire(sparse::row_bytes(format, 50), 0x3f);  // indices up to 127
  for (const auto* kernels : all_sparse_kernels()) {
    std::vector<float> acc(60, 0.0f);
    kernels->decode_add(format, wire.data(), 1, 50, Dtype::f32, acc.data());
    EXPECT_TRUE(std::all_of(acc.begin() + 50, acc.end(), [](float v) { return v == 0; }));
  }
}

}  // namespace
}  // namespace gossamer::test
