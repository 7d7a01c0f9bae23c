// Flat memory: gather, scatter and scale on the CPU, for every dtype, in place and at any alignment.
#include "codec_support.h"
#include "flat/flat.h"

namespace gossamer::test {
namespace {

using flat::Segment;

struct Tensors {  // of these sizes, laid one after another in the flat buffer
  Dtype dtype;
  std::vector<Bytes> tensors;
  std::vector<Segment> segments;
  int64_t numel = 0;

  explicit Tensors(Dtype dtype) : dtype(dtype) {
    for (int64_t n : {1, 0, 7, 64, 97, 1021, 2}) {
      tensors.push_back(as_bytes(dtype, make_values(n, Temper::ordinary, 61 + static_cast<unsigned>(n))));
      segments.push_back({nullptr, numel, n});
      numel += n;
    }
    for (size_t i = 0; i < tensors.size(); ++i) segments[i].tensor = tensors[i].data();
  }
  int64_t count() const { return static_cast<int64_t>(segments.size()); }
  Bytes joined() const {
    Bytes all;
    for (const Bytes& tensor : tensors) all.insert(all.end(), tensor.begin(), tensor.end());
    return all;
  }
};

Bytes scaled(Dtype dtype, const Bytes& x, double scale) {
  auto values = as_values(dtype, x);
  for (double& value : values)
    value = dtype == Dtype::f64 ? value * scale : static_cast<float>(value) * static_cast<float>(scale);
  return as_bytes(dtype, values);
}

TEST(Flat, GatherThenScatterReturnsEveryBit) {
  for (Dtype dtype : kDtypes) {
    Tensors from(dtype), to(dtype);
    Bytes buffer(from.numel * element_size(dtype), 0xab);
    flat::gather(dtype, from.segments.data(), from.count(), buffer.data(), 1.0);
    EXPECT_EQ(buffer, from.joined());
    for (Bytes& tensor : to.tensors) std::fill(tensor.begin(), tensor.end(), uint8_t{0xcd});
    flat::scatter(dtype, to.segments.data(), to.count(), buffer.data(), 1.0);
    EXPECT_EQ(to.joined(), from.joined());
  }
}

TEST(Flat, ScaleIsAppliedOnceAndRoundedToTheTensorType) {
  for (Dtype dtype : kDtypes)
    for (double scale : {0.25, 1.0 / 3, -2.0}) {
      Tensors tensors(dtype);
      const Bytes before = tensors.joined();
      Bytes buffer(before.size(), 0xab);
      flat::gather(dtype, tensors.segments.data(), tensors.count(), buffer.data(), scale);
      EXPECT_EQ(buffer, scaled(dtype, before, scale));
      flat::scatter(dtype, tensors.segments.data(), tensors.count(), before.data(), scale);
      EXPECT_EQ(tensors.joined(), scaled(dtype, before, scale));
      Bytes whole = before;
      flat::scale(dtype, whole.data(), tensors.numel, scale);
      EXPECT_EQ(whole, scaled(dtype, before, scale));
    }
}

TEST(Flat, ATensorThatIsItsPlaceInTheBufferIsScaledInPlace) {
  for (Dtype dtype : kDtypes)
    for (double scale : {1.0, 0.5}) {
      Tensors tensors(dtype);
      const Bytes before = tensors.joined();
      Bytes buffer = before;
      for (Segment& segment : tensors.segments)
        segment.tensor = buffer.data() + segment.offset * element_size(dtype);
      flat::gather(dtype, tensors.segments.data(), tensors.count(), buffer.data(), scale);
      EXPECT_EQ(buffer, scaled(dtype, before, scale));
    }
}

TEST(Flat, ASegmentWithoutTensorGathersZerosAndScattersNowhere) {
  for (Dtype dtype : kDtypes) {
    Bytes buffer(10 * element_size(dtype), 0xab);
    const Segment hole{nullptr, 2, 5};
    flat::gather(dtype, &hole, 1, buffer.data(), -3.0);
    for (int64_t i = 0; i < static_cast<int64_t>(buffer.size()); ++i) {
      const int64_t element = i / element_size(dtype);
      ASSERT_EQ(buffer[i], element >= 2 && element < 7 ? 0 : 0xab);
    }
    flat::scatter(dtype, &hole, 1, buffer.data(), 1.0);
  }
}

TEST(Flat, TensorsMayStartAtAnyByte) {
  for (Dtype dtype : kDtypes)
    for (int64_t shift : {1, 2, 3}) {
      const Bytes x = as_bytes(dtype, make_values(1100, Temper::ordinary, 67));
      Bytes shifted(x.size() + 8), buffer(x.size());
      std::memcpy(shifted.data() + shift, x.data(), x.size());
      const Segment segment{shifted.data() + shift, 0, 1100};
      flat::gather(dtype, &segment, 1, buffer.data(), 0.5);
      EXPECT_EQ(buffer, scaled(dtype, x, 0.5));
      flat::scatter(dtype, &segment, 1, x.data(), 0.5);
      EXPECT_EQ(Bytes(shifted.begin() + shift, shifted.end() - (8 - shift)), scaled(dtype, x, 0.5));
    }
}

// The identity codec, which sends the tensor's own bytes, has the same contract.
TEST(Flat, SummedRowsHaveTheBitsOfTheIdentityCodec) {
  for (Dtype dtype : kDtypes)
    for (Temper temper : sampled(kTempers))
      for (int64_t n : {1, 7, 8, 2047, 2048, 2049, 5003})
        for (int64_t count : {1, 2, 3, 5}) {
          const Spec spec{Kind::identity, dtype, 1};
          const int64_t stride = codec::row_bytes(spec, n);
          std::vector<Bytes> rows;
          Bytes wire(count * stride);
          for (int64_t r = 0; r < count; ++r) {
            rows.push_back(as_bytes(dtype, make_values(n, temper, 71 + static_cast<unsigned>(r))));
            std::memcpy(wire.data() + r * stride, rows[r].data(), rows[r].size());
          }
          Bytes expected(stride);
          codec::kernels().reduce_encode(spec, wire.data(), count, n, n, 1.0 / 3, expected.data(), nullptr);
          expected.resize(n * element_size(dtype));
          std::vector<void*> addresses;
          for (Bytes& row : rows) addresses.push_back(row.data());
          Bytes apart(n * element_size(dtype));
          void* outs[] = {apart.data()};
          flat::sum_rows(dtype, {addresses.data(), count, outs, 1, n}, 1.0 / 3);
          ASSERT_EQ(apart, expected) << "numel " << n << " rows " << count;
          flat::sum_rows(dtype, {addresses.data(), count, addresses.data(), count, n}, 1.0 / 3);
          for (const Bytes& row : rows) ASSERT_EQ(row, expected) << "numel " << n << " rows " << count;
        }
}

TEST(Flat, NoRowsAndEmptyRowsAreNothingToSum) {
  float x = 5;
  void* rows[] = {&x, &x};
  flat::sum_rows(Dtype::f32, {rows, 2, rows, 2, 0}, 0.5);
  flat::sum_rows(Dtype::f32, {nullptr, 0, nullptr, 0, 7}, 0.5);
  EXPECT_EQ(x, 5);
}

}  // namespace
}  // namespace gossamer::test
