// adasum/adasum.h: sums and combination in every dtype and instruction set against loops written from the definition; then
// what the factors promise, and that vectors in one buffer do not affect each other.
#include "adasum/adasum.h"

#include "codec_support.h"

namespace gossamer::test {
namespace {

using adasum::Factors;
using adasum::Sums;
using adasum::Vectors;

// Around a step (16), a lane (32) and a tile (512).
constexpr int64_t kLengths[] = {0, 1, 2, 15, 16, 17, 31, 32, 33, 97, 511, 512, 513, 529, 1021, 2050};

std::vector<const adasum::Kernels*> all_adasum_kernels() {
  std::vector<const adasum::Kernels*> found;
  for (const char* name : {"scalar", "neon", "avx2", "avx512"})
    if (const auto* kernels = adasum::kernels_by_name(name)) found.push_back(kernels);
  return found;
}

Bytes input(Dtype dtype, int64_t numel, Temper temper, unsigned seed) {
  return as_bytes(dtype, make_values(numel, temper, seed + static_cast<unsigned>(numel)));
}

double long_sum(const std::vector<double>& x, const std::vector<double>& y) {
  long double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += static_cast<long double>(x[i]) * y[i];
  return static_cast<double>(sum);
}

// Close to `expected` for terms whose absolute values add up to `scale`; a NaN or an infinity must be equal.
void expect_near(double sum, double expected, double scale, const std::string& where) {
  if (std::isfinite(expected))
    EXPECT_LE(std::fabs(sum - expected), 1e-14 * scale) << where;
  else
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(sum) : sum == expected) << where << ": " << sum;
}

bool same_bits(const Sums& x, const Sums& y) { return std::memcmp(&x, &y, sizeof(x)) == 0; }

bool has_nan(const Sums& x) { return std::isnan(x.dot) || std::isnan(x.a) || std::isnan(x.b); }

TEST(Adasum, SumsAreThoseOfTheDefinitionInEveryInstructionSetAlike) {
  for (Dtype dtype : kDtypes)
    for (Temper temper : sampled(kTempers))
      for (int64_t n : kLengths) {
        const Bytes a = input(dtype, n, temper, 1), b = input(dtype, n, Temper::ordinary, 2);
        const auto x = as_values(dtype, a), y = as_values(dtype, b);
        const double aa = long_sum(x, x), bb = long_sum(y, y);
        const Sums first = adasum::kernels_by_name("scalar")->sums(dtype, a.data(), b.data(), n);
        for (const auto* kernels : all_adasum_kernels()) {
          const auto where = std::string(kernels->name) + " dtype " +
                             std::to_string(static_cast<int>(dtype)) + " temper " +
                             std::to_string(static_cast<int>(temper)) + " numel " + std::to_string(n);
          const Sums sums = kernels->sums(dtype, a.data(), b.data(), n);
          expect_near(sums.dot, long_sum(x, y), std::sqrt(aa) * std::sqrt(bb), where);
          expect_near(sums.a, aa, aa, where);
          expect_near(sums.b, bb, bb, where);
          EXPECT_TRUE(has_nan(sums) || same_bits(sums, first)) << where;
        }
      }
}

// Rounded to float64 after each operation, at the end to float32, then to a type of 16 bits. All NaNs are equal.
Bytes combined(Dtype dtype, const Bytes& a, const Bytes& b, const Factors& factors) {
  auto x = as_values(dtype, a);
  const auto y = as_values(dtype, b);
  for (size_t i = 0; i < x.size(); ++i) {
    const double left = factors.a * x[i], right = factors.b * y[i];
    x[i] = left + right;
    if (std::isnan(x[i])) x[i] = kNan;
    if (dtype != Dtype::f64) x[i] = static_cast<float>(x[i]);
  }
  return as_bytes(dtype, x);
}

TEST(Adasum, ACombinationIsRoundedAsTheDefinitionSaysInEveryInstructionSet) {
  for (Dtype dtype : kDtypes)
    for (Temper temper : sampled(kTempers))
      for (int64_t n : kLengths)
        for (const Factors& factors : {Factors{1.0, 1.0}, Factors{0.5, 0.5}, Factors{1.0 / 3, -1.7}}) {
          const Bytes a = input(dtype, n, temper, 3), b = input(dtype, n, Temper::ordinary, 4);
          const Bytes expected = combined(dtype, a, b, factors);
          for (const auto* kernels : all_adasum_kernels()) {
            Bytes out = a;
            kernels->combine(dtype, out.data(), b.data(), n, factors);
            ASSERT_EQ(out, expected) << kernels->name << " dtype " << static_cast<int>(dtype) << " temper "
                                     << static_cast<int>(temper) << " numel " << n;
            Bytes exchanged = b;
            kernels->combine(dtype, exchanged.data(), a.data(), n, {factors.b, factors.a});
            ASSERT_EQ(exchanged, expected);
          }
        }
}

Bytes adasum_of(Dtype dtype, const std::vector<int64_t>& offsets, Bytes a, const Bytes& b) {
  const Vectors vectors{offsets.data(), static_cast<int64_t>(offsets.size()) - 1};
  std::vector<Sums> sums(vectors.count);
  std::vector<Factors> factors;
  adasum::sums(dtype, vectors, 0, offsets.back(), a.data(), b.data(), sums.data());
  for (const Sums& s : sums) factors.push_back(adasum::factors(s));
  adasum::combine(dtype, vectors, 0, offsets.back(), a.data(), b.data(), factors.data());
  return a;
}

TEST(Adasum, OrthogonalVectorsAreAddedAndEqualOnesAreTheirOwnMean) {
  for (Dtype dtype : kDtypes) {
    const Bytes x = as_bytes<double>(dtype, {3, 0, -2, 0}), y = as_bytes<double>(dtype, {0, 5, 0, 0.25});
    EXPECT_EQ(adasum_of(dtype, {0, 4}, x, y), as_bytes<double>(dtype, {3, 5, -2, 0.25}));
    EXPECT_EQ(adasum_of(dtype, {0, 4}, x, x), x);
  }
}

TEST(Adasum, AVectorOfZerosChangesNothing) {
  for (Dtype dtype : kDtypes) {
    const Bytes x = input(dtype, 97, Temper::ordinary, 5), zeros(x.size(), 0);
    EXPECT_EQ(adasum_of(dtype, {0, 97}, x, zeros), x);
    EXPECT_EQ(adasum_of(dtype, {0, 97}, zeros, x), x);
    EXPECT_EQ(adasum_of(dtype, {0, 97}, zeros, zeros), zeros);
  }
}

TEST(Adasum, AVectorOfNoNormKeepsItsFactorAndNanReachesBoth) {
  const double below = std::nextafter(adasum::kNoNorm, 0.0);
  EXPECT_EQ(adasum::kNoNorm, std::sqrt(std::numeric_limits<double>::min()));
  EXPECT_EQ(adasum::factors({below, below, 4.0 * below}).a, 1.0);
  EXPECT_EQ(adasum::factors({adasum::kNoNorm, adasum::kNoNorm, 1.0}).a, 0.5);
  EXPECT_EQ(adasum::factors({1.0, 2.0, 4.0}).a, 0.75);
  EXPECT_EQ(adasum::factors({1.0, 2.0, 4.0}).b, 0.875);
  EXPECT_TRUE(std::isnan(adasum::factors({NAN, NAN, 4.0}).a));
  EXPECT_TRUE(std::isnan(adasum::factors({NAN, NAN, 4.0}).b));
}

TEST(Adasum, VectorsInOneBufferAreCombinedEachAsIfItWereAlone) {
  const std::vector<int64_t> offsets = {0, 1, 1, 34, 34, 131, 700};
  for (Dtype dtype : kDtypes)
    for (Temper temper : {Temper::ordinary, Temper::huge, Temper::with_nan}) {
      const int64_t n = offsets.back(), size = element_size(dtype);
      const Bytes a = input(dtype, n, temper, 6), b = input(dtype, n, Temper::ordinary, 7);
      const Bytes together = adasum_of(dtype, offsets, a, b);
      for (size_t v = 0; v + 1 < offsets.size(); ++v) {
        const auto part = [&, first = offsets[v] * size, last = offsets[v + 1] * size](const Bytes& x) {
          return Bytes(x.begin() + first, x.begin() + last);
        };
        EXPECT_EQ(part(together), adasum_of(dtype, {0, offsets[v + 1] - offsets[v]}, part(a), part(b)));
      }
    }
}

TEST(Adasum, APieceOfTheBufferGivesItsShareOfTheSumsAndWritesNothingElse) {
  const std::vector<int64_t> offsets = {0, 5, 5, 40, 43, 100};
  const Vectors vectors{offsets.data(), 5};
  for (Dtype dtype : kDtypes) {
    const int64_t size = element_size(dtype);
    const Bytes a = input(dtype, 100, Temper::ordinary, 8), b = input(dtype, 100, Temper::ordinary, 9);
    std::vector<Sums> whole(5), total(5);
    adasum::sums(dtype, vectors, 0, 100, a.data(), b.data(), whole.data());
    const std::vector<Factors> factors = {{1, 2}, {3, 4}, {0.5, 6}, {-7, 8}, {9, 0.1}};
    Bytes expected = a, out = a;
    adasum::combine(dtype, vectors, 0, 100, expected.data(), b.data(), factors.data());
    const std::vector<int64_t> cuts = {0, 0, 3, 41, 42, 43, 100, 100};
    for (size_t c = 0; c + 1 < cuts.size(); ++c) {
      const int64_t begin = cuts[c], end = cuts[c + 1];
      std::vector<Sums> part(5, Sums{NAN, NAN, NAN});
      adasum::sums(dtype, vectors, begin, end, a.data() + begin * size, b.data() + begin * size, part.data());
      for (int v = 0; v < 5; ++v) {
        const bool outside = offsets[v + 1] <= begin || offsets[v] >= end;
        EXPECT_TRUE(!outside || same_bits(part[v], Sums{}));
        total[v] += part[v];
      }
      adasum::combine(dtype, vectors, begin, end, out.data() + begin * size, b.data() + begin * size,
                      factors.data());
      EXPECT_TRUE(std::equal(out.begin(), out.begin() + end * size, expected.begin()));
      EXPECT_TRUE(std::equal(out.begin() + end * size, out.end(), a.begin() + end * size));
    }
    for (int v = 0; v < 5; ++v) {
      EXPECT_NEAR(total[v].dot, whole[v].dot, 1e-13);
      EXPECT_NEAR(total[v].a, whole[v].a, 1e-13);
      EXPECT_NEAR(total[v].b, whole[v].b, 1e-13);
    }
  }
}

}  // namespace
}  // namespace gossamer::test
