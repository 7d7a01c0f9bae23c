// The values of a lane in four registers, for lanes_vector.inl. Included before it, inside the structs of such lanes, which have
// defined Floats, Ints and `width`. The macros apply an operation to each register.

#define GOSSAMER_EACH(op) {op(x.a), op(x.b), op(x.c), op(x.d)}
#define GOSSAMER_EACH_WITH(op, y) {op(x.a, y), op(x.b, y), op(x.c, y), op(x.d, y)}
#define GOSSAMER_EACH_PAIR(op) {op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)}
#define GOSSAMER_EACH_TRIPLE(op) {op(x.a, y.a, z.a), op(x.b, y.b, z.b), op(x.c, y.c, z.c), op(x.d, y.d, z.d)}
#define GOSSAMER_EACH_LOAD(op, p) {op(p), op(p + width / 4), op(p + width / 2), op(p + width / 4 * 3)}
#define GOSSAMER_EACH_STORE(op, p) \
  op(p, x.a), op(p + width / 4, x.b), op(p + width / 2, x.c), op(p + width / 4 * 3, x.d)

struct F {
  Floats a, b, c, d;
};
struct I {
  Ints a, b, c, d;
};
static HD Ints rotated_by_one(Ints x) {
  return GOSSAMER_MM_SI(xor_si)(GOSSAMER_MM(slli_epi32)(x, 1), GOSSAMER_MM(srli_epi32)(x, 31));
}
