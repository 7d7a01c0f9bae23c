// What the AVX2 and the AVX-512 lane have in common beside lanes_vector.inl. Included after it, inside their structs.

// Which of eight numbers belongs to each element: they are for the halves of the octaves from 8 to 12, 12 to 16, 16 to 24, and
// so on, to 128. The bits 22 to 24 of a float are the place of its half.
template <int a, int b, int c, int d, int e, int f, int g, int h>
static HD Ints int_of_half(Floats x) {
  return looked_up(_mm256_setr_epi32(e, f, g, h, a, b, c, d), GOSSAMER_MM(srli_epi32)(as_ints(x), 22));
}
template <int a, int b, int c, int d, int e, int f, int g, int h>
static HD Floats float_of_half(Floats x) {
  const __m256i bits = _mm256_castps_si256(_mm256_setr_ps(e, f, g, h, a, b, c, d));
  return as_floats(looked_up(bits, GOSSAMER_MM(srli_epi32)(as_ints(x), 22)));
}
template <int... numbers>
static HD F floats_of_half(F x) {
  return GOSSAMER_EACH(float_of_half<numbers...>);
}
template <int... numbers>
static HD I ints_of_half(F x) {
  return GOSSAMER_EACH(int_of_half<numbers...>);
}
// x y - z where that is exact, so that it does not matter that it is rounded once.
static HD F exact_mul_sub(F x, F y, F z) { return GOSSAMER_EACH_TRIPLE(GOSSAMER_MM(fmsub_ps)); }
static HD Floats add_twice(Floats x, Floats y) {
  return GOSSAMER_MM(fmadd_ps)(y, GOSSAMER_MM(set1_ps)(2.0f), x);
}
static HD F add_twice(F x, F y) { return GOSSAMER_EACH_PAIR(add_twice); }  // x + 2 y
// z, and one more where x < y.
static HD I count_less(F x, F y, I z) { return GOSSAMER_EACH_TRIPLE(count_less); }
static HD I with_sign(I x, F y) { return GOSSAMER_EACH_PAIR(with_sign); }
template <int base>
static HD Bytes bytes_above(I x) {
  return _mm256_add_epi8(bytes_of(x), _mm256_set1_epi8(base));
}
