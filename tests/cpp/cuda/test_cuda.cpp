// The CUDA kernels against the scalar CPU kernels: equal bytes, equal values. Skips without a GPU. Built by nvcc (cmake with
// -DGOSSAMER_CUDA=ON, or make gpu-check), and by the host's compiler with emulator/, which needs no GPU. Device memory has
// exactly the bytes of its contents, so that a sanitizer sees an access beyond them.
#include <memory>
#include <set>

#include "codec/cuda.h"
#include "codec_support.h"
#include "flat/cuda.h"
#include "optim/cuda.h"
#include "sparse_support.h"

namespace gossamer::test {
namespace {

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device";
  }
};

// Bytes on the device, copied in and out.
class DeviceBytes {
 public:
  explicit DeviceBytes(const Bytes& bytes) : size_(bytes.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, bytes.data(), size_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  DeviceBytes(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  Bytes get() const {
    Bytes bytes(size_);
    EXPECT_EQ(cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }

 private:
  void* data_ = nullptr;
  size_t size_;
};

// `bytes` behind `skipped` bytes of another kind.
Bytes behind(int64_t skipped, const Bytes& bytes) {
  Bytes all(skipped, 0xcd);
  all.insert(all.end(), bytes.begin(), bytes.end());
  return all;
}

void expect_same_values(Dtype dtype, const Bytes& x, const Bytes& y, const std::string& where) {
  ASSERT_EQ(x.size(), y.size());
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()) / element_size(dtype); ++i) {
    const double a = get(dtype, x.data(), i), b = get(dtype, y.data(), i);
    ASSERT_TRUE((std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b)))
        << where << " element " << i << ": " << a << ", " << b;
  }
}

// Runs encode, decode, decode_add and reduce_encode of one matrix on the host and on the device, where tensors begin
// `skipped` elements after the start of their memory. The dtype of the source concerns encode alone, and a key concerns
// encode and reduce_encode: what is left runs for a source of the spec's dtype, and without a key.
void expect_device_equals_host(const Spec& spec, Dtype source, const Rows& rows, Temper temper,
                               int64_t skipped = 0) {
  const Kernels& host = *codec::kernels_by_name("scalar");
  const std::string where = describe(host, spec, rows, temper);
  const Bytes& x = random_bytes(source, rows.numel, temper, 71);
  const Bytes wire = encode(host, spec, source, x, rows);
  const int64_t before_x = skipped * element_size(source), before_out = skipped * element_size(spec.dtype);
  const DeviceBytes device_x(behind(before_x, x)), device_wire(Bytes(wire.size(), 0xab));
  codec::cuda::encode(spec, source, device_x.data() + before_x, rows, device_wire.data(), nullptr);
  ASSERT_EQ(device_wire.get(), wire) << where;
  if (source != spec.dtype) return;

  const int64_t valid = rows.row_numel > 3 ? rows.row_numel - 1 : rows.row_numel;
  const Dtype sum = accumulate_dtype(spec.dtype);
  Bytes reduced(codec::row_bytes(spec, rows.row_numel), 0xab);
  const DeviceBytes device_reduced(reduced);
  std::vector<double> scratch(rows.row_numel);
  host.reduce_encode(spec, wire.data(), rows.rows, rows.row_numel, valid, 0.3, reduced.data(),
                     scratch.data());
  const DeviceBytes device_sum(Bytes(rows.row_numel * element_size(sum), 0xab));
  codec::cuda::reduce_encode(spec, device_wire.data(), rows.rows, rows.row_numel, valid, 0.3,
                             device_reduced.data(), device_sum.data(), nullptr);
  ASSERT_EQ(device_reduced.get(), reduced) << where << " reduce_encode";
  if (spec.key != 0) return;

  const DeviceBytes out(behind(before_out, Bytes(rows.numel * element_size(spec.dtype), 0xab)));
  codec::cuda::decode(spec, device_wire.data(), rows, out.data() + before_out, nullptr);
  expect_same_values(spec.dtype, behind(before_out, decode(host, spec, wire, rows)), out.get(),
                     where + " decode");

  Bytes acc = random_bytes(sum, rows.row_numel, Temper::ordinary, 73);
  const int64_t before_acc = skipped * element_size(sum);
  const DeviceBytes device_acc(behind(before_acc, acc));
  host.decode_add(spec, wire.data(), rows.rows, rows.row_numel, valid, acc.data());
  codec::cuda::decode_add(spec, device_wire.data(), rows.rows, rows.row_numel, valid,
                          device_acc.data() + before_acc, nullptr);
  expect_same_values(sum, behind(before_acc, acc), device_acc.get(), where + " decode_add");

  // The same rows, each in memory of its own.
  const int64_t stride = codec::row_bytes(spec, rows.row_numel);
  std::vector<std::unique_ptr<DeviceBytes>> apart;
  std::vector<const uint8_t*> each;
  for (int64_t r = 0; r < rows.rows; ++r) {
    const Bytes row(wire.begin() + r * stride, wire.begin() + (r + 1) * stride);
    apart.push_back(std::make_unique<DeviceBytes>(row));
    each.push_back(apart.back()->data());
  }
  const codec::WireRows there(each.data());
  const DeviceBytes out_apart(behind(before_out, Bytes(rows.numel * element_size(spec.dtype), 0xab)));
  codec::cuda::decode(spec, there, rows, out_apart.data() + before_out, nullptr);
  ASSERT_EQ(out_apart.get(), out.get()) << where << " decode, rows apart";
  const DeviceBytes reduced_apart(Bytes(reduced.size(), 0xcd));
  codec::cuda::reduce_encode(spec, there, rows.rows, rows.row_numel, valid, 0.3, reduced_apart.data(),
                             device_sum.data(), nullptr);
  ASSERT_EQ(reduced_apart.get(), reduced) << where << " reduce_encode, rows apart";
  const DeviceBytes acc_apart(behind(before_acc, random_bytes(sum, rows.row_numel, Temper::ordinary, 73)));
  codec::cuda::decode_add(spec, there, rows.rows, rows.row_numel, valid, acc_apart.data() + before_acc,
                          nullptr);
  ASSERT_EQ(acc_apart.get(), device_acc.get()) << where << " decode_add, rows apart";
}

// Stops at the first matrix that differs.
void expect_equality(Kind kind, const std::vector<Rows>& shapes, const std::vector<Temper>& tempers,
                     int64_t skipped = 0) {
  for (Dtype dtype : kDtypes)
    for (int64_t block : {32, 256, 8192})
      for (Dtype source : std::set{dtype, accumulate_dtype(dtype)})
        for (uint64_t key : {uint64_t{0}, uint64_t{0x123456789abcdef0}}) {
          if ((!has_blocks(kind) && block != 256) || (!is_stochastic(kind) && key != 0)) continue;
          for (const Rows& rows : shapes)
            for (Temper temper : tempers) {
              if (testing::Test::HasFailure()) return;
              expect_device_equals_host({kind, dtype, block_of(kind, block), key}, source, rows, temper,
                                        skipped);
            }
        }
}

// Runs encode_with_error and reduce_encode_with_error of one matrix on the host and on the device.
void expect_equal_errors(const Spec& spec, Dtype source, const Rows& rows, int64_t skipped) {
  const Kernels& host = *codec::kernels_by_name("scalar");
  const std::string where = describe(host, spec, rows, Temper::ordinary) + " with error";
  const Bytes& x = random_bytes(source, rows.numel, Temper::ordinary, 71);
  Bytes error = random_bytes(spec.dtype, rows.numel, Temper::ordinary, 75);
  Bytes wire(rows.rows * codec::row_bytes(spec, rows.row_numel), 0xab);
  const int64_t before_x = skipped * element_size(source), before_error = skipped * element_size(spec.dtype);
  const DeviceBytes device_x(behind(before_x, x)), device_error(behind(before_error, error)),
      device_wire(wire);
  host.encode_with_error(spec, source, x.data(), error.data(), rows, wire.data());
  codec::cuda::encode_with_error(spec, source, device_x.data() + before_x, device_error.data() + before_error,
                                 rows, device_wire.data(), nullptr);
  ASSERT_EQ(device_wire.get(), wire) << where;
  ASSERT_EQ(device_error.get(), behind(before_error, error)) << where;
  if (source != spec.dtype) return;

  const int64_t valid = rows.row_numel > 3 ? rows.row_numel - 1 : rows.row_numel;
  Bytes own = random_bytes(spec.dtype, rows.row_numel, Temper::ordinary, 77);
  Bytes reduced(codec::row_bytes(spec, rows.row_numel), 0xab);
  const DeviceBytes device_own(behind(before_error, own)), device_reduced(reduced);
  const DeviceBytes device_sum(Bytes(rows.row_numel * element_size(spec.dtype), 0xab));
  std::vector<double> sum(rows.row_numel);
  host.reduce_encode_with_error(spec, wire.data(), rows.rows, rows.row_numel, valid, 0.3, reduced.data(),
                                sum.data(), own.data());
  codec::cuda::reduce_encode_with_error(spec, device_wire.data(), rows.rows, rows.row_numel, valid, 0.3,
                                        device_reduced.data(), device_sum.data(),
                                        device_own.data() + before_error, nullptr);
  ASSERT_EQ(device_reduced.get(), reduced) << where << " reduced";
  ASSERT_EQ(device_own.get(), behind(before_error, own)) << where << " reduced";
}

void expect_equal_errors(Kind kind, const std::vector<Rows>& shapes, int64_t skipped = 0) {
  for (Dtype dtype : kDtypes) {
    if (dtype != accumulate_dtype(dtype)) continue;
    for (int64_t block : {32, 64, 256, 8192})
      for (Dtype source : {dtype, Dtype::f16, Dtype::bf16})
        for (uint64_t key : {uint64_t{0}, uint64_t{0x123456789abcdef0}}) {
          if (dtype == Dtype::f64 && source != dtype) continue;
          if ((!has_blocks(kind) && block != 256) || (!is_stochastic(kind) && key != 0)) continue;
          for (const Rows& rows : shapes) {
            if (testing::Test::HasFailure()) return;
            expect_equal_errors({kind, dtype, block_of(kind, block), key}, source, rows, skipped);
          }
        }
  }
}

// Of packs, of bytes that several codes share, and of teams of 1 to 32 threads.
std::vector<Rows> all_tails() {
  std::vector<Rows> shapes;
  for (int64_t n = 1; n <= 132; ++n)
    if (n <= 36 || (n >= 60 && n <= 68) || n >= 124) shapes.push_back({2, n, 2 * n - 1});
  return shapes;
}

// Each codec has tests of its own, so that they can be chosen by its name.
#define GOSSAMER_TESTS(number, name, Codec)                                                                 \
  TEST_F(Cuda, name##GivesTheBytesAndValuesOfTheCpuForEveryShape) {                                         \
    expect_equality(Kind::name, row_shapes(), {Temper::ordinary, Temper::with_nan});                        \
  }                                                                                                         \
  TEST_F(Cuda, name##GivesTheBytesAndValuesOfTheCpuForEveryTail) {                                          \
    expect_equality(Kind::name, all_tails(), {Temper::ordinary});                                           \
  }                                                                                                         \
  TEST_F(Cuda, name##GivesTheBytesAndValuesOfTheCpuForUnalignedViews) {                                     \
    expect_equality(Kind::name, {{1, 509, 509}, {3, 256, 600}, {3, 256, 799, 301}}, {Temper::ordinary}, 1); \
  }                                                                                                         \
  TEST_F(Cuda, name##GivesTheBytesAndValuesOfTheCpuForEveryTemper) {                                        \
    expect_equality(Kind::name, {{3, 509, 3 * 509}}, {std::begin(kTempers), std::end(kTempers)});           \
  }                                                                                                         \
  TEST_F(Cuda, name##GivesTheBytesAndValuesOfTheCpuForLongRows) {                                           \
    expect_equality(Kind::name, {{1, 32769, 32769}, {3, 16411, 40003}, {2, 16411, 36423, 20012}},           \
                    {Temper::ordinary});                                                                    \
  }                                                                                                         \
  TEST_F(Cuda, name##LeavesTheErrorsOfTheCpu) {                                                             \
    expect_equal_errors(Kind::name, row_shapes());                                                          \
    expect_equal_errors(Kind::name, {{1, 509, 509}, {3, 256, 600}, {3, 256, 799, 301}}, 1);                 \
    expect_equal_errors(Kind::name, {{3, 16411, 40003}, {2, 16411, 36423, 20012}});                         \
  }
GOSSAMER_CODECS(GOSSAMER_TESTS)
#undef GOSSAMER_TESTS

TEST_F(Cuda, GatherAndScatterMoveTheBitsOfMoreSegmentsThanOneTableHolds) {
  for (Dtype dtype : kDtypes)
    for (double scale : {1.0, 0.3}) {
      std::vector<flat::Segment> host, device;
      std::vector<int64_t> sizes = {0, 8192, 8193, 20001};
      for (int i = 0; i < 1100; ++i) sizes.push_back(i % 7 * 3 + 1);
      int64_t numel = 0;
      for (int64_t n : sizes) {
        host.push_back({nullptr, numel, n});
        numel += n;
      }
      Bytes x = as_bytes(dtype, make_values(numel, Temper::ordinary, 79));
      const DeviceBytes device_x(x), device_flat(Bytes(x.size(), 0xab)), device_back(Bytes(x.size(), 0xcd));
      device = host;
      for (size_t i = 0; i < host.size(); ++i) {
        if (i % 11 == 5) continue;  // no tensor: zeros
        host[i].tensor = x.data() + host[i].offset * element_size(dtype);
        device[i].tensor = device_x.data() + host[i].offset * element_size(dtype);
      }
      const auto count = static_cast<int64_t>(host.size());
      Bytes expected(x.size(), 0xab);
      flat::gather(dtype, host.data(), count, expected.data(), scale);
      flat::cuda::gather(dtype, device.data(), count, device_flat.data(), scale, nullptr);
      ASSERT_EQ(device_flat.get(), expected);

      Bytes back(x.size(), 0xcd);
      for (size_t i = 0; i < host.size(); ++i) {
        if (host[i].tensor == nullptr) continue;
        host[i].tensor = back.data() + host[i].offset * element_size(dtype);
        device[i].tensor = device_back.data() + host[i].offset * element_size(dtype);
      }
      flat::scatter(dtype, host.data(), count, expected.data(), scale);
      flat::cuda::scatter(dtype, device.data(), count, device_flat.data(), scale, nullptr);
      ASSERT_EQ(device_back.get(), back);
      flat::scale(dtype, expected.data(), numel, scale);
      flat::cuda::scale(dtype, device_flat.data(), numel, scale, nullptr);
      ASSERT_EQ(device_flat.get(), expected);
    }
}

// `rows` rows that begin `skipped` elements after an aligned address, summed by the rank `first`, in place or into one row.
void expect_equal_sums(Dtype dtype, Temper temper, int64_t numel, int64_t skipped, int rows, int first,
                       int outs) {
  std::vector<Bytes> host;
  std::vector<std::unique_ptr<DeviceBytes>> device;
  std::vector<void*> here, there;
  const int64_t at = skipped * element_size(dtype);
  for (int r = 0; r < rows; ++r) {
    const auto seed = static_cast<unsigned>(101 + r);
    host.push_back(random_bytes(dtype, numel + skipped, temper, seed));
    device.push_back(std::make_unique<DeviceBytes>(host.back()));
    there.push_back(device.back()->data() + at);
  }
  for (Bytes& row : host) here.push_back(row.data() + at);
  flat::sum_rows(dtype, {here.data(), rows, here.data(), outs, numel}, 1.0 / 3);
  flat::cuda::sum_rows(dtype, {there.data(), rows, there.data(), outs, numel, first}, 1.0 / 3, nullptr);
  for (int r = 0; r < rows; ++r)
    ASSERT_EQ(device[r]->get(), host[r]) << "numel " << numel << ", " << rows << " rows, rank " << first;
}

TEST_F(Cuda, SummedRowsHaveTheBitsOfTheCpuAtAnyAlignment) {
  for (Dtype dtype : kDtypes)
    for (Temper temper : kTempers)
      for (int64_t numel : {0, 1, 7, 8, 4099, 20011})
        for (int64_t skipped : {0, 1})  // elements, so that no vector load may be used
          expect_equal_sums(dtype, temper, numel, skipped, 3, 1, 3);
}

TEST_F(Cuda, SummedRowsHaveTheSameBitsOnEveryRank) {
  for (Dtype dtype : kDtypes)
    for (int rows : {1, 2, 5, 8, 9, 19})
      for (int first = 0; first < rows; ++first)
        for (int outs : {1, rows}) expect_equal_sums(dtype, Temper::ordinary, 2051, 0, rows, first, outs);
}

// More segments than one table holds, cut from four long buffers, so that most do not start where a vector may.
TEST_F(Cuda, OptimizersLeaveTheBitsOfTheCpu) {
  std::vector<int64_t> sizes = {0, 4095, 4096, 4097, 20001};
  for (int i = 0; i < 200; ++i) sizes.push_back(i % 7 * 3 + 1);
  int64_t numel = 0;
  for (int64_t n : sizes) numel += n;
  for (Dtype dtype : kDtypes)
    for (int variant = 0; variant < 4; ++variant) {
      const Dtype wide = accumulate_dtype(dtype);
      auto squares = make_values(numel, Temper::ordinary, 89);
      for (float& x : squares) x = std::fabs(x);
      Bytes host[] = {as_bytes(dtype, make_values(numel, Temper::ordinary, 83)),
                      as_bytes(dtype, make_values(numel, Temper::with_inf, 85)),
                      as_bytes(wide, make_values(numel, Temper::ordinary, 87)), as_bytes(wide, squares)};
      const DeviceBytes device[] = {DeviceBytes(host[0]), DeviceBytes(host[1]), DeviceBytes(host[2]),
                                    DeviceBytes(host[3])};
      std::vector<optim::Segment> here, there;
      int64_t offset = 0;
      for (int64_t n : sizes) {
        const int64_t at = offset * element_size(dtype), state_at = offset * element_size(wide);
        here.push_back({host[0].data() + at,
                        host[1].data() + at,
                        {host[2].data() + state_at, host[3].data() + state_at},
                        n});
        there.push_back({device[0].data() + at,
                         device[1].data() + at,
                         {device[2].data() + state_at, device[3].data() + state_at},
                         n});
        offset += n;
      }
      const auto count = static_cast<int64_t>(sizes.size());
      if (variant < 2) {
        const optim::Adam adam{variant == 0 ? 0.9 : 0.3, 0.999, 1e-8, 0.01, 0.3, 0.1 * variant, 0.999, false};
        optim::adam(dtype, adam, here.data(), count, 0, numel);
        optim::cuda::adam(dtype, adam, there.data(), count, nullptr);
      } else {
        const optim::Sgd sgd{0.1, variant == 2 ? 0.9 : 0.0, 0.2, 0.01, true, false, false};
        optim::sgd(dtype, sgd, here.data(), count, 0, numel);
        optim::cuda::sgd(dtype, sgd, there.data(), count, nullptr);
      }
      const std::string where = "variant " + std::to_string(variant);
      expect_same_values(dtype, host[0], device[0].get(), where);
      for (int k : {2, 3}) expect_same_values(wide, host[k], device[k].get(), where + " state");
    }
}

// The pads of ranks that meet, all on one device.
class Pads {
 public:
  using Words = std::vector<uint32_t>;
  explicit Pads(int size) {
    for (int rank = 0; rank < size; ++rank) {
      all_.push_back(std::make_unique<DeviceBytes>(Bytes(sizeof(uint32_t) * flat::kMeetingWords)));
      addresses_.push_back(reinterpret_cast<uint32_t*>(all_.back()->data()));
    }
  }
  Words get(int rank) const {
    const Bytes bytes = all_[rank]->get();
    Words words(flat::kMeetingWords);
    std::memcpy(words.data(), bytes.data(), bytes.size());
    return words;
  }
  void set(int rank, const Words& words) {
    EXPECT_EQ(
        cudaMemcpy(addresses_[rank], words.data(), sizeof(uint32_t) * words.size(), cudaMemcpyHostToDevice),
        cudaSuccess);
  }
  void meet(int rank) {
    auto* missing = reinterpret_cast<int*>(missing_.data());
    flat::cuda::meet({addresses_.data(), rank, static_cast<int>(all_.size()), 10'000, missing}, nullptr);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }

 private:
  std::vector<std::unique_ptr<DeviceBytes>> all_;
  std::vector<uint32_t*> addresses_;
  DeviceBytes missing_{Bytes(sizeof(int), 0xff)};
};

TEST_F(Cuda, a_meeting_tells_its_number_to_every_rank_and_counts_it) {
  for (const int size : {1, 2, 31, 32, 33, flat::kMostRanks}) {
    Pads pads(size);
    const int rank = size - 1;
    for (uint32_t meeting = 1; meeting <= 3; ++meeting) {
      Pads::Words mine = pads.get(rank);  // the others have come, some of them to the next meeting too
      for (int peer = 0; peer < rank; ++peer) mine[peer] = meeting + peer % 2;
      pads.set(rank, mine);
      pads.meet(rank);
      mine[rank] = mine[flat::kMostRanks] = meeting;
      ASSERT_EQ(pads.get(rank), mine) << size << " ranks, meeting " << meeting;
      for (int peer = 0; peer < rank; ++peer) {
        Pads::Words theirs(flat::kMeetingWords);
        theirs[rank] = meeting;
        ASSERT_EQ(pads.get(peer), theirs) << size << " ranks, rank " << peer;
      }
    }
  }
}

TEST_F(Cuda, the_number_of_a_meeting_may_wrap_around) {
  Pads pads(3);
  Pads::Words mine(flat::kMeetingWords);
  mine[flat::kMostRanks] = 0xffffffff;
  mine[1] = 0;  // has come to this meeting
  mine[2] = 1;  // and to the next one
  pads.set(0, mine);
  pads.meet(0);
  mine[flat::kMostRanks] = 0;
  EXPECT_EQ(pads.get(0), mine);
}

TEST_F(Cuda, ChunkTopKWritesTheBytesOfTheHostAndAddsUpEqually) {
  ASSERT_TRUE(sparse::cuda_kernels() != nullptr);
  const auto& device = *sparse::cuda_kernels();
  const auto& host = *sparse::kernels_by_name("scalar");
  for (const Format& format : sparse_formats())
    for (int64_t numel : sparse_sizes(format)) {
      if (numel == 0) continue;
      for (int temper = 0; temper < kSparseTempers; ++temper) {
        const std::string where = "chunk " + std::to_string(format.chunk) + " k " +
                                  std::to_string(format.kept) + " numel " + std::to_string(numel) +
                                  " temper " + std::to_string(temper);
        const int64_t rows = 2, row_bytes = sparse::row_bytes(format, numel);
        const auto x = sparse_values(rows * numel, temper, 7);
        Bytes bytes(x.size() * sizeof(float)), wire(rows * row_bytes, 0xab);
        std::memcpy(bytes.data(), x.data(), bytes.size());
        host.encode(format, x.data(), rows, numel, wire.data());
        const DeviceBytes device_x(bytes), device_wire(Bytes(wire.size(), 0xcd));
        device.encode(format, reinterpret_cast<const float*>(device_x.data()), rows, numel,
                      device_wire.data(), nullptr);
        ASSERT_EQ(device_wire.get(), wire) << where;
        for (Dtype dtype : {Dtype::f32, Dtype::f64}) {
          Bytes acc = as_bytes(dtype, make_values(numel, Temper::ordinary, 73));
          const DeviceBytes device_acc(acc);
          host.decode_add(format, wire.data(), rows, numel, dtype, acc.data());
          device.decode_add(format, device_wire.data(), rows, numel, dtype, device_acc.data(), nullptr);
          expect_same_values(dtype, acc, device_acc.get(), where + " decode_add");
        }
      }
    }
}

}  // namespace
}  // namespace gossamer::test
