// How many launches a bucket takes, and how many bytes of device memory: at 8 ranks, as the engine does it over NCCL, whose
// own work is not counted. tests/late counts the calls of the engine. The kernels are those of float32.
#include <gtest/gtest.h>

#include <vector>

#include "codec/codec_list.h"
#include "codec/cuda_launches.h"
#include "flat/cuda.h"
#include "traffic.h"

namespace gossamer::test {
namespace {

using codec::cuda::Launches;
using codec::cuda::LaunchesWithError;
using emulator::Traffic;

constexpr int64_t kRanks = 8, kChunk = 8192, kNumel = kRanks * kChunk;
constexpr int64_t kBytes = kNumel * sizeof(float), kChunkBytes = kChunk * sizeof(float);

// Device memory whose traffic is counted.
class Watched {
 public:
  explicit Watched(int64_t bytes) {
    EXPECT_EQ(cudaMalloc(&memory_, static_cast<size_t>(bytes)), cudaSuccess);
    for (int64_t i = 0; i < bytes; ++i) get()[i] = static_cast<uint8_t>(i * i % 61);  // small finite floats
    emulator::watch(memory_, static_cast<size_t>(bytes));
  }
  Watched(const Watched&) = delete;
  ~Watched() {
    emulator::forget(memory_);
    cudaFree(memory_);
  }
  uint8_t* get() const { return static_cast<uint8_t*>(memory_); }
  float* floats() const { return static_cast<float*>(memory_); }

 private:
  void* memory_ = nullptr;
};

class Bucket : public testing::Test {
 public:
  static codec::Spec int8() { return {codec::Kind::int8, Dtype::f32, 64}; }
  static codec::Spec int4() { return {codec::Kind::int4, Dtype::f32, 32}; }
  static constexpr codec::Rows kRows{kRanks, kChunk, kNumel};
  static constexpr double kMean = 1.0 / kRanks;
  const Watched gradients{kBytes}, flat{kBytes}, error{kBytes}, wire{kBytes}, reduced{kChunkBytes};

  Traffic gather() const {
    constexpr int64_t tensors = 64, numel = kNumel / tensors;
    std::vector<flat::Segment> segments;
    for (int64_t i = 0; i < tensors; ++i)
      segments.push_back({gradients.floats() + i * numel, i * numel, numel});
    emulator::take_traffic();
    flat::cuda::gather(Dtype::f32, segments.data(), tensors, flat.get(), 1.0, nullptr);
    return emulator::take_traffic();
  }
  Traffic encode(const codec::Spec& spec, bool with_error) const {
    emulator::take_traffic();
    if (with_error)
      LaunchesWithError<float>::encode_with_error(spec, Dtype::f32, flat.get(), error.get(), kRows,
                                                  wire.get(), nullptr);
    else
      Launches<float>::encode(spec, Dtype::f32, flat.get(), kRows, wire.get(), nullptr);
    return emulator::take_traffic();
  }
  Traffic reduce(const codec::Spec& spec, bool with_error) const {
    emulator::take_traffic();
    if (with_error)
      LaunchesWithError<float>::reduce_encode_with_error(spec, wire.get(), kRanks, kChunk, kChunk, kMean,
                                                         reduced.get(), nullptr, error.get(), nullptr);
    else
      Launches<float>::reduce_encode(spec, wire.get(), kRanks, kChunk, kChunk, kMean, reduced.get(), nullptr,
                                     nullptr);
    return emulator::take_traffic();
  }
  Traffic decode(const codec::Spec& spec) const {
    emulator::take_traffic();
    Launches<float>::decode(spec, wire.get(), kRows, flat.get(), nullptr);
    return emulator::take_traffic();
  }
};

#define EXPECT_TRAFFIC(traffic, bytes_read, bytes_written) \
  EXPECT_EQ(traffic.launches, 1);                          \
  EXPECT_EQ(traffic.read, bytes_read);                     \
  EXPECT_EQ(traffic.written, bytes_written)

double bytes_an_element(const std::vector<Traffic>& all) {
  int64_t bytes = 0;
  for (const Traffic& each : all) bytes += each.read + each.written;
  return static_cast<double>(bytes) / kNumel;
}

TEST_F(Bucket, a_gather_is_one_launch_that_copies_every_byte_once) {
  const Traffic moved = gather();
  EXPECT_TRAFFIC(moved, kBytes, kBytes);
  EXPECT_EQ(moved.read_at_all, kBytes);
  EXPECT_EQ(moved.widest_loads, kBytes / 16);
}

TEST_F(Bucket, int8_takes_three_launches_and_at_most_12_bytes_an_element) {
  const int64_t row = codec::row_bytes(int8(), kChunk);
  const Traffic encoded = encode(int8(), false), sum = reduce(int8(), false), decoded = decode(int8());
  EXPECT_TRAFFIC(encoded, kBytes, kRanks * row);
  EXPECT_EQ(encoded.read_at_all, kBytes);  // kept in registers from the search for the largest to the codes
  EXPECT_TRAFFIC(sum, kRanks * row, row);
  // A lane reads 16 codes of each row in one load, and their scale.
  EXPECT_EQ(sum.widest_loads, kRanks * kChunk / 16);
  EXPECT_EQ(sum.read_at_all, kRanks * kChunk / 16 * (16 + 2));
  EXPECT_TRAFFIC(decoded, kRanks * row, kBytes);
  ASSERT_TRUE(bytes_an_element({encoded, sum, decoded}) <= 12);
}

TEST_F(Bucket, int4_with_feedback_takes_three_launches_and_at_most_20_bytes_an_element) {
  const int64_t row = codec::row_bytes(int4(), kChunk);
  const Traffic encoded = encode(int4(), true), sum = reduce(int4(), true), decoded = decode(int4());
  EXPECT_TRAFFIC(encoded, 2 * kBytes, kBytes + kRanks * row);
  EXPECT_EQ(encoded.read_at_all, 2 * kBytes);
  EXPECT_TRAFFIC(sum, kRanks * row + kChunkBytes, row + kChunkBytes);
  EXPECT_EQ(sum.widest_loads, kRanks * kChunk / 32);
  EXPECT_EQ(sum.read_at_all, kRanks * kChunk / 32 * (16 + 2) + kChunkBytes);
  EXPECT_TRAFFIC(decoded, kRanks * row, kBytes);
  ASSERT_TRUE(bytes_an_element({encoded, sum, decoded}) <= 20);
}

}  // namespace
}  // namespace gossamer::test
