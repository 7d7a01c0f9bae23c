// What holds for every codec: equal bytes on every instruction set, ragged rows, and the fused reduce-encode
// as the sum of its parts.
#include "codec_support.h"

namespace gossamer::test {
namespace {

template <class Body>  // body(spec, source)
void for_each_spec(Body body, std::initializer_list<uint64_t> keys = {0}) {
  for (Kind kind : kKinds)
    for (Dtype dtype : kDtypes)
      for (int64_t block : {32, 256, 4096})
        for (uint64_t key : keys) {
          if ((!has_blocks(kind) && block != 256) || (!is_stochastic(kind) && key != 0)) continue;
          const Spec spec{kind, dtype, block_of(kind, block), key};
          body(spec, dtype);
          if (accumulate_dtype(dtype) != dtype) body(spec, accumulate_dtype(dtype));
        }
}

// Equal, except that any NaN equals any other.
void expect_same_values(Dtype dtype, const Bytes& x, const Bytes& y, const std::string& where) {
  ASSERT_EQ(x.size(), y.size());
  if (x == y) return;
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()) / element_size(dtype); ++i) {
    const double a = get(dtype, x.data(), i), b = get(dtype, y.data(), i);
    if (std::isnan(a) && std::isnan(b)) continue;
    ASSERT_TRUE(a == b && std::signbit(a) == std::signbit(b))
        << where << " element " << i << ": " << a << ", " << b;
  }
}

TEST(Kernels, EveryInstructionSetEncodesToEqualBytesAndDecodesToEqualValues) {
  const auto all = all_kernels();
  const auto body = [&](const Spec& spec, Dtype source) {
    for (const Rows& rows : row_shapes())
      for (Temper temper : sampled(kTempers)) {
        const Bytes& x = random_bytes(source, rows.numel, temper, 41);
        const Bytes wire = encode(*all[0], spec, source, x, rows);
        const Bytes out = decode(*all[0], spec, wire, rows);
        for (size_t k = 1; k < all.size(); ++k) {
          const std::string where = describe(*all[k], spec, rows, temper);
          ASSERT_EQ(encode(*all[k], spec, source, x, rows), wire) << where;
          expect_same_values(spec.dtype, decode(*all[k], spec, wire, rows), out, where);
        }
      }
  };
  for_each_spec(body, {0, 0x123456789abcdef0});
}

TEST(Kernels, ARowDecodesAloneAsItDoesAmongOthers) {
  for (const Kernels* kernels : all_kernels())
    for_each_spec([&](const Spec& spec, Dtype source) {
      const Rows rows{3, 257, 2 * 257 + 100};
      const Bytes& x = random_bytes(source, rows.numel, Temper::ordinary, 43);
      const Bytes wire = encode(*kernels, spec, source, x, rows);
      const int64_t stride = codec::row_bytes(spec, 257), row_size = 257 * element_size(source);
      for (int64_t r = 0; r < 3; ++r) {
        const int64_t valid = r == 2 ? 100 : 257;
        const Bytes alone(x.begin() + r * row_size, x.begin() + r * row_size + valid * element_size(source));
        const Bytes expected(wire.begin() + r * stride, wire.begin() + (r + 1) * stride);
        ASSERT_EQ(encode(*kernels, spec, source, alone, {1, 257, valid}), expected);
      }
    });
}

// Columns 7 to 263 of three rows of 300, of which the last has 200.
TEST(Kernels, ColumnsOfAMatrixAreEncodedAsIfTheyWereAloneAndWhatLiesBetweenThemIsLeftAlone) {
  constexpr int64_t first = 7, n = 257, pitch = 300, numel = 2 * pitch + 200;
  for (const Kernels* kernels : all_kernels())
    for_each_spec([&](const Spec& spec, Dtype source) {
      const int64_t bytes = element_size(source);
      const Rows columns{3, n, numel - first, pitch};
      const Bytes& x = random_bytes(source, numel, Temper::ordinary, 43);
      Bytes wire(3 * codec::row_bytes(spec, n), 0xab), alone;
      kernels->encode(spec, source, x.data() + first * bytes, columns, wire.data());
      for (int64_t r = 0; r < 3; ++r) {
        const auto begin = x.begin() + (r * pitch + first) * bytes;
        const int64_t valid = std::min(n, numel - r * pitch - first);
        const Bytes row = encode(*kernels, spec, source, {begin, begin + valid * bytes}, {1, n, valid});
        alone.insert(alone.end(), row.begin(), row.end());
      }
      ASSERT_EQ(wire, alone) << describe(*kernels, spec, columns, Temper::ordinary);
      if (source != spec.dtype) return;

      Bytes out(numel * bytes, 0xab);
      kernels->decode(spec, wire.data(), columns, out.data() + first * bytes);
      const int64_t stride = codec::row_bytes(spec, n);
      Bytes expected(out.size(), 0xab);
      for (int64_t r = 0; r < 3; ++r) {
        const Bytes row(wire.begin() + r * stride, wire.begin() + (r + 1) * stride);
        const Bytes values = decode(*kernels, spec, row, {1, n, std::min(n, numel - r * pitch - first)});
        std::copy(values.begin(), values.end(), expected.begin() + (r * pitch + first) * bytes);
      }
      ASSERT_EQ(out, expected) << describe(*kernels, spec, columns, Temper::ordinary);
    });
}

TEST(Kernels, ColumnsWithoutAnElementAreEncodedAsZeros) {
  for (const Kernels* kernels : all_kernels())
    for_each_spec([&](const Spec& spec, Dtype source) {
      const Rows none{2, 257, -3, 300}, zeros{2, 257, 0};
      ASSERT_EQ(encode(*kernels, spec, source, {}, none), encode(*kernels, spec, source, {}, zeros));
      kernels->decode(spec, encode(*kernels, spec, source, {}, none).data(), none, nullptr);
    });
}

Bytes reduce(const Kernels& kernels, const Spec& spec, const Bytes& wire, int64_t rows, int64_t row_numel,
             int64_t valid, double scale) {
  Bytes out(codec::row_bytes(spec, row_numel), 0xab);
  std::vector<double> scratch(row_numel);
  kernels.reduce_encode(spec, wire.data(), rows, row_numel, valid, scale, out.data(), scratch.data());
  return out;
}

template <class Sum>
Bytes reduce_in_parts(const Kernels& kernels, const Spec& spec, const Bytes& wire, int64_t rows,
                      int64_t row_numel, int64_t valid, double scale) {
  std::vector<Sum> sums(row_numel, Sum{0});
  kernels.decode_add(spec, wire.data(), rows, row_numel, valid, sums.data());
  for (Sum& sum : sums) {
    sum *= static_cast<Sum>(scale);
    if (std::isnan(sum)) sum = std::numeric_limits<Sum>::quiet_NaN();
  }
  Bytes memory(sums.size() * sizeof(Sum));
  if (!sums.empty()) std::memcpy(memory.data(), sums.data(), memory.size());
  return encode(kernels, spec, accumulate_dtype(spec.dtype), memory, {1, row_numel, valid});
}

TEST(Kernels, ReduceEncodeEqualsDecodeAddThenScaleThenEncode) {
  const auto all = all_kernels();
  for_each_spec([&](const Spec& spec, Dtype source) {
    if (source != spec.dtype) return;
    for (int64_t row_numel : {1, 31, 97, 256, 509, 2049, 4099, 8192})
      for (int64_t rows : {1, 2, 3, 4})
        for (Temper temper : sampled(kSomeTempers)) {
          const int64_t valid = row_numel > 2 && rows == 3 ? row_numel - 2 : row_numel;
          const Rows matrix{rows, row_numel, rows * row_numel};
          const Bytes& x = random_bytes(source, matrix.numel, temper, 47);
          const Bytes wire = encode(*all[0], spec, source, x, matrix);
          const double scale = 1.0 / static_cast<double>(rows);
          const Bytes expected =
              spec.dtype == Dtype::f64
                  ? reduce_in_parts<double>(*all[0], spec, wire, rows, row_numel, valid, scale)
                  : reduce_in_parts<float>(*all[0], spec, wire, rows, row_numel, valid, scale);
          for (const Kernels* kernels : all)
            ASSERT_EQ(reduce(*kernels, spec, wire, rows, row_numel, valid, scale), expected)
                << describe(*kernels, spec, matrix, temper);
        }
  });
}

TEST(Kernels, EveryInstructionSetReducesToEqualBytesByRandomNumbers) {
  const auto all = all_kernels();
  const auto body = [&](const Spec& spec, Dtype source) {
    if (source != spec.dtype || spec.key == 0) return;
    for (int64_t row_numel : {1, 97, 509, 2049, 8192}) {
      const Rows matrix{3, row_numel, 3 * row_numel};
      const Bytes& x = random_bytes(source, matrix.numel, Temper::ordinary, 61);
      const Bytes wire = encode(*all[0], spec, source, x, matrix);
      const Bytes expected = reduce(*all[0], spec, wire, 3, row_numel, row_numel, 1.0 / 3);
      for (const Kernels* kernels : all)
        ASSERT_EQ(reduce(*kernels, spec, wire, 3, row_numel, row_numel, 1.0 / 3), expected)
            << describe(*kernels, spec, matrix, Temper::ordinary);
    }
  };
  for_each_spec(body, {0x123456789abcdef0});
}

TEST(Kernels, DecodeAddAddsRowsInOrderToWhatIsThere) {
  for (const Kernels* kernels : all_kernels())
    for_each_spec([&](const Spec& spec, Dtype source) {
      if (source != spec.dtype || spec.dtype == Dtype::f64) return;
      const Rows rows{4, 300, 1200};
      const Bytes& x = random_bytes(source, rows.numel, Temper::ordinary, 53);
      const Bytes wire = encode(*kernels, spec, source, x, rows);
      auto acc = make_values(300, Temper::ordinary, 59), expected = acc;
      const int64_t stride = codec::row_bytes(spec, 300);
      for (int64_t r = 0; r < 4; ++r) {
        std::vector<float> one(300, 0.0f);
        kernels->decode_add(spec, wire.data() + r * stride, 1, 300, 300, one.data());
        for (int i = 0; i < 290; ++i) expected[i] += one[i];
      }
      kernels->decode_add(spec, wire.data(), 4, 300, 290, acc.data());
      ASSERT_EQ(acc, expected) << kernels->name;  // elements from 290 on are left alone
    });
}

TEST(Kernels, RowsThatLieApartGiveTheBytesOfRowsInARow) {
  const auto body = [&](const Spec& spec, Dtype source) {
    if (source != spec.dtype) return;
    for (int64_t row_numel : {1, 97, 256, 2049}) {
      const Rows rows{3, row_numel, 3 * row_numel - row_numel / 3};
      const Bytes& x = random_bytes(source, rows.numel, Temper::ordinary, 67);
      for (const Kernels* kernels : all_kernels()) {
        const Bytes wire = encode(*kernels, spec, source, x, rows);
        const int64_t stride = codec::row_bytes(spec, row_numel);
        std::vector<Bytes> apart;
        for (int64_t r = 0; r < 3; ++r)
          apart.emplace_back(wire.begin() + r * stride, wire.begin() + (r + 1) * stride);
        const uint8_t* each[] = {apart[0].data(), apart[1].data(), apart[2].data()};
        const codec::WireRows there(each);
        const std::string where = describe(*kernels, spec, rows, Temper::ordinary);

        Bytes out(x.size(), 0xab);
        kernels->decode(spec, there, rows, out.data());
        ASSERT_EQ(out, decode(*kernels, spec, wire, rows)) << where;

        Bytes reduced(stride, 0xab);
        std::vector<double> scratch(row_numel), sums(row_numel), expected(row_numel);
        kernels->reduce_encode(spec, there, 3, row_numel, row_numel, 0.3, reduced.data(), scratch.data());
        ASSERT_EQ(reduced, reduce(*kernels, spec, wire, 3, row_numel, row_numel, 0.3)) << where;

        kernels->decode_add(spec, there, 3, row_numel, row_numel, sums.data());
        kernels->decode_add(spec, wire.data(), 3, row_numel, row_numel, expected.data());
        ASSERT_EQ(std::memcmp(sums.data(), expected.data(), row_numel * sizeof(double)), 0) << where;
      }
    }
  };
  for_each_spec(body, {0, 0x123456789abcdef0});
}

TEST(Kernels, AreSelectedByName) {
  const std::string widest = codec::kernels().name;
  EXPECT_TRUE(codec::select_kernels("scalar"));
  EXPECT_STREQ(codec::kernels().name, "scalar");
  EXPECT_FALSE(codec::select_kernels("no such thing"));
  EXPECT_STREQ(codec::kernels().name, "scalar");
  EXPECT_TRUE(codec::select_kernels(widest.c_str()));
  EXPECT_STREQ(codec::kernels().name, widest.c_str());
}

}  // namespace
}  // namespace gossamer::test
