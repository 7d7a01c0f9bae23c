// Error feedback in the kernels: working on a few elements at a time gives the same as passes over all elements, on every
// instruction set.
#include "codec_support.h"

namespace gossamer::test {
namespace {

template <class Body>  // body(spec), of float32 and float64
void for_each_wide_spec(Body body) {
  for (Kind kind : kKinds)
    for (Dtype dtype : {Dtype::f32, Dtype::f64})
      for (int64_t block : {32, 256, 4096})
        for (uint64_t key : {uint64_t{0}, uint64_t{0x123456789abcdef0}}) {
          if ((!has_blocks(kind) && block != 256) || (!is_stochastic(kind) && key != 0)) continue;
          body(Spec{kind, dtype, block_of(kind, block), key});
        }
}

double rounded(Dtype dtype, double x) { return dtype == Dtype::f32 ? static_cast<float>(x) : x; }
double finite_or_zero(double x) { return std::isfinite(x) ? x : 0.0; }

std::vector<Dtype> sources_of(Dtype wide) {
  if (wide == Dtype::f64) return {Dtype::f64};
  return {Dtype::f32, Dtype::f16, Dtype::bf16};
}

TEST(Feedback, EncodeWithErrorAddsEncodesAndKeepsWhatTheWireLeavesOut) {
  for_each_wide_spec([&](const Spec& spec) {
    for (Dtype source : sources_of(spec.dtype))
      for (const Rows& rows : row_shapes())
        for (Temper temper : sampled(kSomeTempers)) {
          const Bytes& x = random_bytes(source, rows.numel, temper, 71);
          const Bytes& before = random_bytes(spec.dtype, rows.numel, Temper::tiny, 73);
          const auto values = as_values(source, x);
          auto sums = as_values(spec.dtype, before);
          for (size_t i = 0; i < sums.size(); ++i) sums[i] = rounded(spec.dtype, sums[i] + values[i]);
          const Bytes summed = as_bytes(spec.dtype, sums);
          const Kernels& plain = *all_kernels()[0];
          const Bytes wire = encode(plain, spec, spec.dtype, summed, rows);
          auto rest = as_values(spec.dtype, decode(plain, spec, wire, rows));
          const auto kept = as_values(spec.dtype, before);
          for (size_t i = 0; i < rest.size(); ++i) {
            const bool is_of_a_row = static_cast<int64_t>(i) % rows.pitch < rows.row_numel;
            rest[i] = is_of_a_row ? finite_or_zero(rounded(spec.dtype, sums[i] - rest[i])) : kept[i];
          }

          for (const Kernels* kernels : all_kernels()) {
            Bytes error = before, out(wire.size(), 0xab);
            kernels->encode_with_error(spec, source, x.data(), error.data(), rows, out.data());
            ASSERT_EQ(out, wire) << describe(*kernels, spec, rows, temper);
            ASSERT_EQ(as_values(spec.dtype, error), rest) << describe(*kernels, spec, rows, temper);
          }
        }
  });
}

TEST(Feedback, ReduceEncodeWithErrorKeepsWhatTheResultLoses) {
  for_each_wide_spec([&](const Spec& spec) {
    for (int64_t row_numel : {1, 31, 256, 2049, 4099, 8192})
      for (int64_t rows : {1, 3, 4})
        for (Temper temper : sampled(kSomeTempers)) {
          const int64_t valid = row_numel > 2 && rows == 3 ? row_numel - 2 : row_numel;
          const double scale = 1.0 / static_cast<double>(rows);
          const Rows matrix{rows, row_numel, rows * row_numel}, one{1, row_numel, valid};
          const Kernels& plain = *all_kernels()[0];
          const Bytes& x = random_bytes(spec.dtype, matrix.numel, temper, 79);
          const Bytes wire = encode(plain, spec, spec.dtype, x, matrix);
          const Bytes& before = random_bytes(spec.dtype, valid, Temper::tiny, 83);

          Bytes sum(row_numel * element_size(spec.dtype), 0);
          plain.decode_add(spec, wire.data(), rows, row_numel, valid, sum.data());
          auto sums = as_values(spec.dtype, sum);
          const double factor = rounded(spec.dtype, scale);
          for (double& each : sums)
            each = std::isnan(each) ? std::numeric_limits<double>::quiet_NaN()
                                    : rounded(spec.dtype, each * factor);
          sums.resize(valid);
          const Bytes expected = encode(plain, spec, spec.dtype, as_bytes(spec.dtype, sums), one);
          const auto decoded = as_values(spec.dtype, decode(plain, spec, expected, one));
          auto rest = as_values(spec.dtype, before);
          for (size_t i = 0; i < rest.size(); ++i) {
            const double lost = rounded(spec.dtype, sums[i] - decoded[i]) * (1.0 / scale);
            rest[i] = finite_or_zero(rounded(spec.dtype, rest[i] + lost));
          }

          for (const Kernels* kernels : all_kernels()) {
            Bytes error = before, out(expected.size(), 0xab);
            std::vector<double> scratch(row_numel);
            kernels->reduce_encode_with_error(spec, wire.data(), rows, row_numel, valid, scale, out.data(),
                                              scratch.data(), error.data());
            ASSERT_EQ(out, expected) << describe(*kernels, spec, matrix, temper);
            ASSERT_EQ(as_values(spec.dtype, error), rest) << describe(*kernels, spec, matrix, temper);
          }
        }
  });
}

}  // namespace
}  // namespace gossamer::test
