// The identity codec: the tensor's own bytes, and sums rounded once to the tensor's type.
#include "codec_support.h"

namespace gossamer::test {
namespace {

TEST(Identity, EveryBitPatternComesBack) {
  for (const Kernels* kernels : all_kernels())
    for (Dtype dtype : kDtypes)
      for (int64_t numel : {1, 31, 97, 4099}) {
        Bytes x(numel * element_size(dtype));
        std::mt19937 random(1);
        for (uint8_t& byte : x) byte = static_cast<uint8_t>(random());
        const Spec spec{Kind::identity, dtype, 1};
        const Rows rows{1, numel, numel};
        const Bytes wire = encode(*kernels, spec, dtype, x, rows);
        ASSERT_EQ(Bytes(wire.begin(), wire.begin() + static_cast<int64_t>(x.size())), x);
        ASSERT_EQ(decode(*kernels, spec, wire, rows), x) << describe(*kernels, spec, rows, Temper::ordinary);
      }
}

TEST(Identity, SumsOfDoublesKeepFloat64) {
  for (const Kernels* kernels : all_kernels()) {
    const Spec spec{Kind::identity, Dtype::f64, 1};
    const std::vector<double> x = {1.0, 1e300, 1e-300, 1e-17, 2.0, 3.0};
    const Bytes wire = encode(*kernels, spec, Dtype::f64, as_bytes(Dtype::f64, x), {2, 3, 6});
    std::vector<double> acc(3, 0.5);
    kernels->decode_add(spec, wire.data(), 2, 3, 3, acc.data());
    EXPECT_EQ(acc, (std::vector<double>{1.5 + 1e-17, 1e300, 3.5}));
  }
}

TEST(Identity, AnEmptyMatrixIsNoWork) {
  for (const Kernels* kernels : all_kernels())
    for (Kind kind : kKinds) {
      const Spec spec{kind, Dtype::f32, block_of(kind, 256)};
      kernels->encode(spec, Dtype::f32, nullptr, {4, 0, 0}, nullptr);
      kernels->decode(spec, nullptr, {4, 0, 0}, nullptr);
      kernels->decode_add(spec, nullptr, 4, 0, 0, nullptr);
      kernels->reduce_encode(spec, nullptr, 4, 0, 0, 1.0, nullptr, nullptr);
    }
}

}  // namespace
}  // namespace gossamer::test
