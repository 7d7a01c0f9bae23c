// reduce.h: the facts about types, the checks, and the choice of a kernel. cpu_*.cpp compile the kernels once for each
// instruction set. A reduction is first turned into one of the few that they have.
#include "shm/reduce.h"

#include "base/check.h"
#include "base/kernel_tables.h"
#include "shm/reduce_kernels.h"

namespace gossamer::shm {

GOSSAMER_CHOOSE_KERNELS()

namespace {

enum class Class { integer, boolean, real, complex };

struct Facts {
  const char* name;
  int64_t size;
  Class kind;
  Type sums;   // what sums run in
  Type parts;  // a complex number's parts; a signed integer's unsigned twin; else the type itself
};

// In the order of Type; names as torch spells them.
constexpr Facts kFacts[] = {
    {"uint8", 1, Class::integer, Type::u8, Type::u8},
    {"int8", 1, Class::integer, Type::i8, Type::u8},
    {"uint16", 2, Class::integer, Type::u16, Type::u16},
    {"int16", 2, Class::integer, Type::i16, Type::u16},
    {"uint32", 4, Class::integer, Type::u32, Type::u32},
    {"int32", 4, Class::integer, Type::i32, Type::u32},
    {"uint64", 8, Class::integer, Type::u64, Type::u64},
    {"int64", 8, Class::integer, Type::i64, Type::u64},
    {"bool", 1, Class::boolean, Type::boolean, Type::boolean},
    {"float16", 2, Class::real, Type::f32, Type::f16},
    {"bfloat16", 2, Class::real, Type::f32, Type::bf16},
    {"float32", 4, Class::real, Type::f32, Type::f32},
    {"float64", 8, Class::real, Type::f64, Type::f64},
    {"float8_e4m3fn", 1, Class::real, Type::f32, Type::e4m3fn},
    {"float8_e4m3fnuz", 1, Class::real, Type::f32, Type::e4m3fnuz},
    {"float8_e5m2", 1, Class::real, Type::f32, Type::e5m2},
    {"float8_e5m2fnuz", 1, Class::real, Type::f32, Type::e5m2fnuz},
    {"complex32", 4, Class::complex, Type::c64, Type::f16},
    {"complex64", 8, Class::complex, Type::c64, Type::f32},
    {"complex128", 16, Class::complex, Type::c128, Type::f64},
};
constexpr int kTypes = sizeof(kFacts) / sizeof(kFacts[0]);
static_assert(kTypes == static_cast<int>(Type::c128) + 1, "kFacts names every Type");

constexpr const char* kOps[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
constexpr int kOpCount = sizeof(kOps) / sizeof(kOps[0]);
static_assert(kOpCount == static_cast<int>(Op::premul_sum) + 1, "kOps names every Op");

bool is_known(Type type) { return static_cast<unsigned>(type) < kTypes; }
bool is_known(Op op) { return static_cast<unsigned>(op) < kOpCount; }
bool is_bitwise(Op op) { return op == Op::band || op == Op::bor || op == Op::bxor; }

const Facts& facts(Type type) {
  GOSSAMER_CHECK(is_known(type), ErrorKind::config, "reduce: unknown element type ", static_cast<int>(type));
  return kFacts[static_cast<int>(type)];
}

void check(const Fold& r, int source_count, int out_count, int64_t numel) {
  const bool fits = r.from == r.to || facts(r.from).sums == r.to || facts(r.to).sums == r.from;
  GOSSAMER_CHECK(fits, ErrorKind::config,
                 "reduce: from and to must be equal, or a type and the type of its sums, got ", name(r.from),
                 " and ", name(r.to));
  GOSSAMER_CHECK(supports(r.from, r.op), ErrorKind::config, "reduce: ", name(r.op), " (operation ",
                 static_cast<int>(r.op), ") is not defined for ", name(r.from));
  GOSSAMER_CHECK(source_count >= 1 && out_count >= 0 && numel >= 0, ErrorKind::config,
                 "reduce: needs at least one source and no negative count, got ", source_count, " sources, ",
                 out_count, " outs and numel ", numel);
  GOSSAMER_CHECK(r.op != Op::avg || r.divisor >= 1, ErrorKind::config,
                 "reduce: the divisor of an average must be positive, got ", r.divisor);
}

// An equal reduction that the kernels have; `numel` then counts elements of the new types.
Fold simplified(Fold r, int64_t& numel) {
  const Facts& from = facts(r.from);
  if (r.op != Op::avg) r.divisor = 1;
  if (r.op != Op::premul_sum) r.factors = nullptr;
  if (r.op == Op::premul_sum && r.factors == nullptr) r.op = Op::sum;
  if (from.kind == Class::boolean) {
    if (r.op == Op::sum || r.op == Op::max) r.op = Op::bor;
    if (r.op == Op::product || r.op == Op::min) r.op = Op::band;
  } else if (from.kind == Class::integer) {
    if (is_bitwise(r.op)) {
      numel *= from.size;
      r.from = r.to = Type::u8;
    } else if (r.op == Op::sum || r.op == Op::product) {
      r.from = r.to = from.parts;
    }
  } else {
    if (r.op == Op::avg) r.op = Op::sum;
    if (from.kind == Class::complex) {
      numel *= 2;
      if (r.op != Op::product) {
        r.to = facts(r.to).parts;
        r.from = from.parts;
      }
    }
  }
  return r;
}

}  // namespace

int64_t element_size(Type type) { return facts(type).size; }
Type accumulate_type(Type type) { return facts(type).sums; }
const char* name(Type type) { return is_known(type) ? kFacts[static_cast<int>(type)].name : "unknown"; }
const char* name(Op op) { return is_known(op) ? kOps[static_cast<int>(op)] : "unknown"; }

bool supports(Type type, Op op) {
  if (!is_known(type) || !is_known(op)) return false;
  switch (facts(type).kind) {
    case Class::integer: return true;
    case Class::boolean: return op != Op::avg && op != Op::premul_sum;
    case Class::real: return !is_bitwise(op);
    case Class::complex: return !is_bitwise(op) && op != Op::min && op != Op::max;
  }
  return false;
}

void reduce(const Fold& reduction, const void* const* sources, int source_count, void* const* outs,
            int out_count, int64_t numel) {
  check(reduction, source_count, out_count, numel);
  if (numel == 0) return;
  const Fold r = simplified(reduction, numel);
  Kernel kernel = kernels().find(r.from, r.to, r.op);
  if (kernel == nullptr) kernel = scalar_kernels->find(r.from, r.to, r.op);
  kernel({sources, source_count, outs, out_count, numel, r.op, r.divisor, r.factors});
}

}  // namespace gossamer::shm
