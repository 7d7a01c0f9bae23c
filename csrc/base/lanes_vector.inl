// What the AVX2, AVX-512 and NEON lanes have in common. Included inside their structs, by lanes_*.h only. Before it they
// define GOSSAMER_MM(op) (_mm256_op, _mm512_op or neon_op), GOSSAMER_MM_SI(op) (for operations on whole registers),
// and the GOSSAMER_EACH macros, which apply an operation to each register of a lane. The struct has the types of a
// register (Floats, Ints, Doubles, Bits16), and what the instruction sets do in different ways.

using Tail = Scalar;

static HD F load(const float* p) { return GOSSAMER_EACH_LOAD(GOSSAMER_MM(loadu_ps), p); }
static HD F load(const double* p) { return GOSSAMER_EACH_LOAD(load_register, p); }
static HD F load(const Half* p) { return GOSSAMER_EACH_LOAD(load_register, p); }
static HD F load(const Bfloat* p) { return GOSSAMER_EACH_LOAD(load_register, p); }
static HD I load(const int8_t* p) { return GOSSAMER_EACH_LOAD(load_register, p); }
static HD I load(const uint8_t* p) { return GOSSAMER_EACH_LOAD(load_register, p); }

static HD void store(float* p, F x) { GOSSAMER_EACH_STORE(GOSSAMER_MM(storeu_ps), p); }
static HD void store(double* p, F x) { GOSSAMER_EACH_STORE(store, p); }
static HD void store(Half* p, F x) { GOSSAMER_EACH_STORE(store, p); }
static HD void store(Bfloat* p, F x) { GOSSAMER_EACH_STORE(store, p); }
static HD void add_to(float* p, F x) { GOSSAMER_EACH_STORE(add_to, p); }
static HD void add_to(double* p, F x) { GOSSAMER_EACH_STORE(add_to, p); }

static HD F rounded(F x, float) { return x; }
static HD F rounded(F x, double) { return x; }
static HD F rounded(F x, Half) { return GOSSAMER_EACH(through_half); }
static HD F rounded(F x, Bfloat) { return GOSSAMER_EACH(through_bfloat); }

static HD F add(F x, float y) { return GOSSAMER_EACH_WITH(GOSSAMER_MM(add_ps), GOSSAMER_MM(set1_ps)(y)); }
static HD F sub(F x, float y) { return GOSSAMER_EACH_WITH(GOSSAMER_MM(sub_ps), GOSSAMER_MM(set1_ps)(y)); }
static HD F mul(F x, float y) { return GOSSAMER_EACH_WITH(GOSSAMER_MM(mul_ps), GOSSAMER_MM(set1_ps)(y)); }
static HD F div(F x, float y) { return GOSSAMER_EACH_WITH(GOSSAMER_MM(div_ps), GOSSAMER_MM(set1_ps)(y)); }
static HD F min(F x, float y) { return GOSSAMER_EACH_WITH(GOSSAMER_MM(min_ps), GOSSAMER_MM(set1_ps)(y)); }
static HD F max(F x, float y) { return GOSSAMER_EACH_WITH(GOSSAMER_MM(max_ps), GOSSAMER_MM(set1_ps)(y)); }
static HD F add(F x, F y) { return GOSSAMER_EACH_PAIR(GOSSAMER_MM(add_ps)); }
static HD F sub(F x, F y) { return GOSSAMER_EACH_PAIR(GOSSAMER_MM(sub_ps)); }
static HD F mul(F x, F y) { return GOSSAMER_EACH_PAIR(GOSSAMER_MM(mul_ps)); }
static HD F less(F x, float y) { return GOSSAMER_EACH_WITH(less, GOSSAMER_MM(set1_ps)(y)); }
static HD F less(F x, F y) { return GOSSAMER_EACH_PAIR(less); }
static HD F with_sign(F x, F y) { return GOSSAMER_EACH_PAIR(with_sign); }
static HD I is_negative(F x) { return GOSSAMER_EACH(is_negative); }
static HD F magnitude_of(F x) { return GOSSAMER_EACH(magnitude_of); }
static HD F sqrt(F x) { return GOSSAMER_EACH(GOSSAMER_MM(sqrt_ps)); }
static HD F floor(F x) { return GOSSAMER_EACH(floor); }
static HD F quiet(F x) { return GOSSAMER_EACH(quiet); }
static HD F rint(F x) { return GOSSAMER_EACH(rint); }
static HD I to_int(F x) { return GOSSAMER_EACH(GOSSAMER_MM(cvtps_epi32)); }
static HD F to_float(I x) { return GOSSAMER_EACH(GOSSAMER_MM(cvtepi32_ps)); }

static HD I min_int(I x, I y) { return GOSSAMER_EACH_PAIR(GOSSAMER_MM(min_epi32)); }
static HD I max_int(I x, I y) { return GOSSAMER_EACH_PAIR(GOSSAMER_MM(max_epi32)); }
static HD I rotated(F x, int32_t turn) { return GOSSAMER_EACH_WITH(rotated, turn); }
static HD I magnitude(F x) { return GOSSAMER_EACH(magnitude); }
static HD I ordered(F x) { return GOSSAMER_EACH(ordered); }

// Unrolled, so that the sums stay in registers.
template <class T>
static HD double sum_in_order(const T* p) {
  constexpr int each = sizeof(Doubles) / sizeof(double);
  Doubles sums[64 / each];
#pragma GCC unroll 64
  for (int i = 0; i < 64 / each; ++i)
    sums[i] = GOSSAMER_MM(add_pd)(load_wide(p + i * each), load_wide(p + i * each + 64));
#pragma GCC unroll 8
  for (int width = 32 / each; width > 0; width /= 2)
#pragma GCC unroll 64
    for (int i = 0; i < width; ++i) sums[i] = GOSSAMER_MM(add_pd)(sums[i], sums[i + width]);
  double last[each];
  GOSSAMER_MM(storeu_pd)(last, sums[0]);
#pragma GCC unroll 8
  for (int width = each / 2; width > 0; width /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) last[i] += last[i + width];
  return last[0];
}

// ---- one register; the lanes of optim/ use the loads and stores too

static HD Floats load_register(const Half* p) { return GOSSAMER_MM(cvtph_ps)(load_bits16(p)); }
static HD Floats load_register(const Bfloat* p) {
  return as_floats(GOSSAMER_MM(slli_epi32)(GOSSAMER_MM(cvtepu16_epi32)(load_bits16(p)), 16));
}
static HD Ints load_register(const int8_t* p) { return GOSSAMER_MM(cvtepi8_epi32)(load_bits8(p)); }
static HD Ints load_register(const uint8_t* p) { return GOSSAMER_MM(cvtepu8_epi32)(load_bits8(p)); }

static HD Doubles load_wide(const double* p) { return GOSSAMER_MM(loadu_pd)(p); }

static HD void store(double* p, Floats x) {
  GOSSAMER_MM(storeu_pd)(p, low(x));
  GOSSAMER_MM(storeu_pd)(p + sizeof(Doubles) / sizeof(double), high(x));
}
static HD void store(Half* p, Floats x) { store_bits16(p, to_half(x)); }
static HD Ints to_bfloat(Floats x) {
  const Ints bits = as_ints(quiet(x));
  const Ints odd = GOSSAMER_MM_SI(and_si)(GOSSAMER_MM(srli_epi32)(bits, 16), GOSSAMER_MM(set1_epi32)(1));
  const Ints half = GOSSAMER_MM(add_epi32)(bits, GOSSAMER_MM(set1_epi32)(0x7fff));
  return GOSSAMER_MM(srli_epi32)(GOSSAMER_MM(add_epi32)(half, odd), 16);
}
static HD void store(Bfloat* p, Floats x) { store_bits16(p, narrowed(to_bfloat(x))); }

static HD void add_to(float* p, Floats x) {
  GOSSAMER_MM(storeu_ps)(p, GOSSAMER_MM(add_ps)(GOSSAMER_MM(loadu_ps)(p), x));
}
static HD void add_to(double* p, Floats x) {
  double* const q = p + sizeof(Doubles) / sizeof(double);
  GOSSAMER_MM(storeu_pd)(p, GOSSAMER_MM(add_pd)(GOSSAMER_MM(loadu_pd)(p), low(x)));
  GOSSAMER_MM(storeu_pd)(q, GOSSAMER_MM(add_pd)(GOSSAMER_MM(loadu_pd)(q), high(x)));
}

static HD Floats through_half(Floats x) { return GOSSAMER_MM(cvtph_ps)(to_half(x)); }
static HD Floats through_bfloat(Floats x) { return as_floats(GOSSAMER_MM(slli_epi32)(to_bfloat(x), 16)); }
static HD Floats magnitude_of(Floats x) { return as_floats(magnitude(x)); }
static HD Floats with_sign(Floats x, Floats sign) {
  return GOSSAMER_MM(or_ps)(magnitude_of(x), GOSSAMER_MM(and_ps)(sign, GOSSAMER_MM(set1_ps)(-0.0f)));
}
static HD Ints scramble(Ints x) {
  x = GOSSAMER_MM(mullo_epi32)(GOSSAMER_MM_SI(xor_si)(x, GOSSAMER_MM(srli_epi32)(x, 16)),
                               GOSSAMER_MM(set1_epi32)(kScramble1));
  x = GOSSAMER_MM(mullo_epi32)(GOSSAMER_MM_SI(xor_si)(x, GOSSAMER_MM(srli_epi32)(x, 15)),
                               GOSSAMER_MM(set1_epi32)(static_cast<int32_t>(kScramble2)));
  return GOSSAMER_MM_SI(xor_si)(x, GOSSAMER_MM(srli_epi32)(x, 16));
}
// 1 + (n + 1/2) / 2^16, where n is in the bits 7 to 22 of a word: the highest ones of its mantissa.
static HD Floats one_and_fraction(Ints x) {
  const Ints n = GOSSAMER_MM_SI(and_si)(x, GOSSAMER_MM(set1_epi32)(0xffff << 7));
  return as_floats(GOSSAMER_MM_SI(or_si)(n, GOSSAMER_MM(set1_epi32)(kOneAndHalf)));
}
static HD Ints rotated(Floats x, int32_t turn) {
  return GOSSAMER_MM_SI(xor_si)(rotated_by_one(as_ints(x)), GOSSAMER_MM(set1_epi32)(turn));
}
static HD Ints magnitude(Floats x) {
  return GOSSAMER_MM_SI(and_si)(as_ints(x), GOSSAMER_MM(set1_epi32)(0x7fffffff));
}
static HD Ints ordered(Floats x) {
  const Ints bits = as_ints(x);
  return GOSSAMER_MM_SI(xor_si)(bits, GOSSAMER_MM(srli_epi32)(GOSSAMER_MM(srai_epi32)(bits, 31), 1));
}
