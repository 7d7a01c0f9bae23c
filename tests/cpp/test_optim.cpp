// The optimizer updates on the CPU: against their definition in float64; every instruction set against the scalar kernels,
// bit for bit; in parts; at any alignment; and 16-bit parameters against float32 ones.
#include "codec_support.h"
#include "optim/optim.h"

namespace gossamer::test {
namespace {

using optim::Adam;
using optim::Segment;
using optim::Sgd;

constexpr int64_t kSizes[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 97, 257, 1021};

std::vector<const optim::Kernels*> all_tables() {
  std::vector<const optim::Kernels*> found;
  for (const char* name : {"scalar", "neon", "avx2", "avx512"})
    if (const optim::Kernels* kernels = optim::kernels_by_name(name)) found.push_back(kernels);
  return found;
}

// A parameter and all memory that an update reads and writes.
struct Memory {
  Dtype dtype;
  Bytes param, grad, states[2];

  Memory(Dtype dtype, int64_t numel, Temper temper, unsigned seed) : dtype(dtype) {
    const Dtype wide = accumulate_dtype(dtype);
    auto squares = make_values(numel, temper, seed + 3);
    for (float& x : squares) x = std::fabs(x);
    param = as_bytes(dtype, make_values(numel, Temper::ordinary, seed));
    grad = as_bytes(dtype, make_values(numel, temper, seed + 1));
    states[0] = as_bytes(wide, make_values(numel, temper, seed + 2));
    states[1] = as_bytes(wide, squares);
  }
  int64_t numel() const { return static_cast<int64_t>(param.size()) / element_size(dtype); }
  Segment segment() { return {param.data(), grad.data(), {states[0].data(), states[1].data()}, numel()}; }
};

// Any NaN equals any other: which of two NaNs an operation keeps depends on the order of its operands.
void expect_same(Dtype dtype, const Bytes& x, const Bytes& y, const std::string& where) {
  const auto a = as_values(dtype, x), b = as_values(dtype, y);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    ASSERT_TRUE((std::isnan(a[i]) && std::isnan(b[i])) ||
                (a[i] == b[i] && std::signbit(a[i]) == std::signbit(b[i])))
        << where << " element " << i << ": " << a[i] << ", " << b[i];
}
void expect_same(const Memory& x, const Memory& y, const std::string& where) {
  expect_same(x.dtype, x.param, y.param, where + " parameter");
  for (int k = 0; k < 2; ++k)
    expect_same(accumulate_dtype(x.dtype), x.states[k], y.states[k], where + " state");
}

// Either optimizer, so that a test can run both.
struct Update {
  std::string name;
  bool is_adam;
  Adam adam_options;
  Sgd sgd_options;

  void operator()(const optim::Kernels& kernels, Memory& memory) const {
    if (is_adam)
      kernels.adam(memory.dtype, adam_options, memory.segment());
    else
      kernels.sgd(memory.dtype, sgd_options, memory.segment());
  }
  void in_part(Dtype dtype, const std::vector<Segment>& segments, int64_t begin, int64_t end) const {
    const auto count = static_cast<int64_t>(segments.size());
    if (is_adam)
      optim::adam(dtype, adam_options, segments.data(), count, begin, end);
    else
      optim::sgd(dtype, sgd_options, segments.data(), count, begin, end);
  }
};

std::vector<Update> updates() {
  std::vector<Update> all;
  for (double beta1 : {0.9, 0.3})
    for (double weight_decay : {0.0, 0.01})
      for (double shrink : {1.0, 0.999})
        for (bool maximize : {false, true})
          all.push_back({"adam", true, {beta1, 0.999, 1e-8, 0.01, 0.3, weight_decay, shrink, maximize}, {}});
  for (double momentum : {0.0, 0.9})
    for (double weight_decay : {0.0, 0.01})
      for (bool nesterov : {false, true})
        for (bool maximize : {false, true})
          for (bool first : {false, true})
            all.push_back({"sgd", false, {}, {0.1, momentum, 0.2, weight_decay, nesterov, maximize, first}});
  return all;
}

// The definitions in float64, on values.
struct Element {
  double param, grad, state[2];
};
void define(const Update& update, Element& e) {
  if (update.is_adam) {
    const Adam& a = update.adam_options;
    double g = a.maximize ? -e.grad : e.grad;
    e.param *= a.shrink;
    g += a.weight_decay * e.param;
    e.state[0] = a.beta1 * e.state[0] + (1 - a.beta1) * g;
    e.state[1] = a.beta2 * e.state[1] + (1 - a.beta2) * g * g;
    e.param -= a.step_size * e.state[0] / (std::sqrt(e.state[1]) / a.root_correction2 + a.eps);
  } else {
    const Sgd& s = update.sgd_options;
    double g = (s.maximize ? -e.grad : e.grad) + s.weight_decay * e.param;
    if (s.momentum != 0) {
      e.state[0] = s.first ? g : s.momentum * e.state[0] + (1 - s.dampening) * g;
      g = s.nesterov ? g + s.momentum * e.state[0] : e.state[0];
    }
    e.param -= s.lr * g;
  }
}

TEST(Optim, UpdatesAreTheirDefinition) {
  for (Dtype dtype : {Dtype::f32, Dtype::f64})
    for (const Update& update : updates())
      for (const optim::Kernels* kernels : all_tables()) {
        Memory memory(dtype, 257, Temper::ordinary, 5);
        const auto param = as_values(dtype, memory.param), grad = as_values(dtype, memory.grad);
        const auto first = as_values(dtype, memory.states[0]), second = as_values(dtype, memory.states[1]);
        update(*kernels, memory);
        const auto got = as_values(dtype, memory.param);
        const auto new_first = as_values(dtype, memory.states[0]);
        const auto new_second = as_values(dtype, memory.states[1]);
        const double tolerance = dtype == Dtype::f64 ? 1e-14 : 1e-5;
        for (size_t i = 0; i < got.size(); ++i) {
          Element e{param[i], grad[i], {first[i], second[i]}};
          define(update, e);
          ASSERT_NEAR(got[i], e.param, tolerance * (1 + std::fabs(e.param))) << kernels->name << update.name;
          ASSERT_NEAR(new_first[i], e.state[0], tolerance * 10);
          ASSERT_NEAR(new_second[i], e.state[1], tolerance * 10);
        }
      }
}

TEST(Optim, EveryInstructionSetGivesTheBitsOfTheScalarKernels) {
  for (Dtype dtype : kDtypes)
    for (const Update& update : updates())
      for (int64_t numel : kSizes)
        for (const optim::Kernels* kernels : all_tables()) {
          Memory expected(dtype, numel, Temper::ordinary, 7), got = expected;
          update(*all_tables()[0], expected);
          update(*kernels, got);
          expect_same(expected, got, std::string(kernels->name) + " " + update.name);
        }
}

TEST(Optim, EveryInstructionSetTreatsSpecialValuesAlike) {
  for (Dtype dtype : kDtypes)
    for (const Update& update : updates())
      for (Temper temper : sampled(kTempers))
        for (const optim::Kernels* kernels : all_tables()) {
          Memory expected(dtype, 509, temper, 11), got = expected;
          update(*all_tables()[0], expected);
          update(*kernels, got);
          expect_same(expected, got, std::string(kernels->name) + " " + update.name);
        }
}

TEST(Optim, PartsOfAListOfSegmentsGiveTheBitsOfTheWhole) {
  for (Dtype dtype : kDtypes)
    for (const Update& update : updates()) {
      std::vector<Memory> expected, got;
      for (int64_t numel : {5, 0, 97, 33, 1}) {
        expected.emplace_back(dtype, numel, Temper::ordinary, 13 + static_cast<unsigned>(numel));
        got.push_back(expected.back());
      }
      for (Memory& memory : expected) update(optim::kernels(), memory);
      std::vector<Segment> segments;
      for (Memory& memory : got) segments.push_back(memory.segment());
      const int64_t cuts[] = {0, 3, 5, 50, 120, 121, 136};
      for (int i = 0; i + 1 < 7; ++i) update.in_part(dtype, segments, cuts[i], cuts[i + 1]);
      for (size_t i = 0; i < got.size(); ++i) expect_same(expected[i], got[i], update.name);
    }
}

TEST(Optim, APartLeavesTheOthersAlone) {
  const Update adam = updates().front();
  Memory memory(Dtype::f32, 100, Temper::ordinary, 17);
  const Memory before = memory;
  adam.in_part(Dtype::f32, {memory.segment()}, 10, 20);
  for (int64_t i = 0; i < 100; ++i) {
    const bool same = std::memcmp(&memory.param[4 * i], &before.param[4 * i], 4) == 0;
    ASSERT_EQ(same, i < 10 || i >= 20) << i;
  }
}

TEST(Optim, MemoryMayStartAtAnyByte) {
  for (Dtype dtype : kDtypes)
    for (const Update& update : updates())
      for (const optim::Kernels* kernels : all_tables()) {
        Memory expected(dtype, 101, Temper::ordinary, 19), got = expected;
        Segment segment = expected.segment();
        Bytes shifted[4];
        void* const from[] = {segment.param, got.grad.data(), segment.states[0], segment.states[1]};
        const size_t sizes[] = {expected.param.size(), got.grad.size(), got.states[0].size(),
                                got.states[1].size()};
        for (int k = 0; k < 4; ++k) {
          shifted[k].resize(sizes[k] + 4);
          std::memcpy(shifted[k].data() + k + 1, from[k], sizes[k]);
        }
        segment = {shifted[0].data() + 1,
                   shifted[1].data() + 2,
                   {shifted[2].data() + 3, shifted[3].data() + 4},
                   101};
        if (update.is_adam)
          kernels->adam(dtype, update.adam_options, segment);
        else
          kernels->sgd(dtype, update.sgd_options, segment);
        update(*kernels, expected);
        std::memcpy(got.param.data(), segment.param, sizes[0]);
        for (int k = 0; k < 2; ++k) std::memcpy(got.states[k].data(), segment.states[k], sizes[2]);
        expect_same(expected, got, std::string(kernels->name) + " " + update.name);
      }
}

TEST(Optim, SixteenBitParametersAreComputedInFloat32AndRoundedOnce) {
  for (Dtype dtype : {Dtype::f16, Dtype::bf16})
    for (const Update& update : updates())
      for (const optim::Kernels* kernels : all_tables()) {
        Memory narrow(dtype, 257, Temper::ordinary, 23);
        Memory wide(Dtype::f32, 257, Temper::ordinary, 23);
        wide.param = as_bytes(Dtype::f32, as_values(dtype, narrow.param));
        wide.grad = as_bytes(Dtype::f32, as_values(dtype, narrow.grad));
        update(*kernels, narrow);
        update(*kernels, wide);
        expect_same(dtype, narrow.param, as_bytes(dtype, as_values(Dtype::f32, wide.param)), update.name);
        for (int k = 0; k < 2; ++k)
          expect_same(Dtype::f32, narrow.states[k], wide.states[k], update.name + " state");
      }
}

}  // namespace
}  // namespace gossamer::test
