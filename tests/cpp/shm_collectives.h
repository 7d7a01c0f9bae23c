// What the tests of shm/'s collectives share: groups that spin or sleep as asked, guarded memory, inputs that every rank can
// compute for every rank, and one run of each collective, compared bit for bit with what this rank computes alone from all
// inputs. Groups as threads or processes come from shm_support.h.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "shm/collectives.h"
#include "shm/pieces.h"
#include "shm_support.h"

namespace gossamer::test {

using shm::Group;
using shm::Op;
using shm::Type;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Ranks that may spin at a meeting cut their data into smaller rounds, and look for each other in another way.
struct Setting {
  int ranks;
  bool spins;
};

inline std::vector<Setting> settings() {
  if (kSanitized) return {{1, true}, {2, true}, {3, false}, {4, true}};
  return {{1, true}, {1, false}, {2, true}, {2, false}, {3, true}, {3, false}, {4, true}, {4, false}};
}

// Gives `body` a group that spins or sleeps, whatever the number of cores. Every rank writes the same number of cores.
inline Body with_spinning(bool spins, shm::Store& store, const Body& body) {
  return [&store, spins, body](Group& first) {
    auto meeting = shm::meet(store, first.rank(), first.size(), in_seconds(20));
    reinterpret_cast<shm::Header*>(meeting.region.data())->cores = spins ? first.size() : 0;
    Group group(std::move(meeting));
    EXPECT_EQ(group.may_spin(), spins);
    body(group);
  };
}

inline void run_threads(Setting setting, const Body& body) {
  ThreadStore store;
  run_threads(setting.ranks, with_spinning(setting.spins, store, body));
}

inline void run_processes(Setting setting, const Body& body) {
  ProcessStore store;
  run_processes(setting.ranks, with_spinning(setting.spins, store, body));
}

// ---- memory

// Bytes with a guard before and behind them; an odd number of floats begins at an odd address.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : bytes_(bytes), begin_(kGuard + bytes / 4 % 2), memory_(begin_ + bytes + kGuard, kUntouched) {}
  explicit Buffer(const Bytes& content) : Buffer(static_cast<int64_t>(content.size())) {
    shm::copy(data(), content.data(), bytes_);
  }
  uint8_t* data() { return memory_.data() + begin_; }

  void expect(const Bytes& expected, const std::string& what) {
    ASSERT_EQ(bytes_, static_cast<int64_t>(expected.size())) << what;
    if (!std::equal(expected.begin(), expected.end(), data())) {
      const auto differs = std::mismatch(expected.begin(), expected.end(), data()).first - expected.begin();
      ADD_FAILURE() << what << ": first wrong byte is " << differs << " of " << bytes_;
    }
    const uint8_t* const memory = memory_.data();
    EXPECT_TRUE(all_are(kUntouched, memory, data()) &&
                all_are(kUntouched, data() + bytes_, memory + memory_.size()))
        << what << ": wrote beyond the ends";
  }
  void expect_untouched(const std::string& what) { expect(Bytes(bytes_, kUntouched), what); }

 private:
  static constexpr uint8_t kUntouched = 0xab;
  static constexpr int64_t kGuard = 64;
  int64_t bytes_, begin_;
  Bytes memory_;
};

inline void** pointers(std::vector<Buffer>& buffers, std::vector<void*>& into) {
  for (auto& buffer : buffers) into.push_back(buffer.data());
  return into.data();
}

// ---- inputs and results

// Floats are finite and near 1 in size, and their sums depend on the order.
inline Pattern pattern(Type type) {
  switch (type) {
    case Type::boolean: return {0x0101010101010101, 0};
    case Type::f32:
    case Type::c64: return {0x83ffffff83ffffff, 0x3c0000003c000000};
    case Type::f64:
    case Type::c128: return {0x80ffffffffffffff, 0x3f00000000000000};
    case Type::bf16: return {0x83ff83ff83ff83ff, 0x3c003c003c003c00};
    case Type::f16:
    case Type::c32: return {0x87ff87ff87ff87ff, 0x3800380038003800};
    case Type::e4m3fn:
    case Type::e4m3fnuz: return {0x8787878787878787, 0x3030303030303030};
    case Type::e5m2:
    case Type::e5m2fnuz: return {0x8383838383838383, 0x3838383838383838};
    default: return {};
  }
}

inline Bytes elements(Type type, int64_t count, uint64_t seed) {
  return content(count * shm::element_size(type), seed, pattern(type));
}

// The input of rank `from` for rank `to` in call number `seed`.
inline Bytes part(Type type, int64_t count, unsigned seed, int from, int to = 0) {
  return elements(type, count, (uint64_t{seed} * 64 + static_cast<unsigned>(from)) * 64 + to + 1);
}
inline Bytes bytes_part(int64_t bytes, unsigned seed, int from, int to = 0) {
  return part(Type::u8, bytes, seed, from, to);
}

inline double factor_of(int rank) { return 0.625 + 1.5 * rank; }

inline shm::Summing summing(const Group& group, Type from, Op op, Type to) {
  return {{from, to, op, group.size()}, factor_of(group.rank())};
}

// The fold of all inputs in rank order, computed in this process.
inline Bytes folded(const std::vector<Bytes>& inputs, int64_t count, shm::Fold reduction) {
  std::vector<const void*> sources;
  std::vector<double> factors;
  for (const auto& input : inputs) {
    factors.push_back(factor_of(static_cast<int>(sources.size())));
    sources.push_back(input.data());
  }
  if (reduction.op == Op::premul_sum) reduction.factors = factors.data();
  Bytes result(count * shm::element_size(reduction.to));
  void* out = result.data();
  shm::reduce(reduction, sources.data(), static_cast<int>(sources.size()), &out, 1, count);
  return result;
}

inline std::string describe(const Group& group, const std::string& what, int64_t count, unsigned seed) {
  return what + " of " + std::to_string(count) + ", seed " + std::to_string(seed) + ", rank " +
         std::to_string(group.rank()) + " of " + std::to_string(group.size()) +
         (group.may_spin() ? ", spinning" : ", sleeping");
}

// Sizes around one round, and around several.
inline std::vector<int64_t> sizes_around(int64_t round) {
#if defined(__SANITIZE_THREAD__)
  return {0, 17, round + 1, 3 * round + 7};  // threads meet once a round, whatever is left over
#endif
  return {0, 1, 17, round - 1, round, round + 1, 2 * round, 3 * round + 7};
}

// The elements of a rank's place in a round: in a segment with a place for each rank, or for each but its owner.
inline int64_t place_of(const Group& group, int64_t element_bytes) {
  return shm::round_down(group.round_bytes() / group.size(), shm::kLine) / element_bytes;
}
inline int64_t place_of_others(const Group& group, int64_t element_bytes, int64_t table_bytes = 0) {
  const int64_t places = std::max(1, group.size() - 1);
  return shm::round_down((group.round_bytes() - table_bytes) / places, shm::kLine) / element_bytes;
}

// ---- one run of each collective; all ranks pass the same arguments

inline void check_all_reduce(Group& group, Type type, Op op, int64_t count, unsigned seed) {
  std::vector<Bytes> inputs;
  for (int peer = 0; peer < group.size(); ++peer) inputs.push_back(part(type, count, seed, peer));
  Buffer data(inputs[group.rank()]);
  const auto sum = summing(group, type, op, type);
  shm::all_reduce(group, data.data(), count, sum, nullptr, in_seconds(kLong));
  data.expect(folded(inputs, count, sum.reduction), describe(group, "all_reduce", count, seed));
}

inline void check_reduce_scatter(Group& group, Type from, Op op, Type to, const std::vector<int64_t>& counts,
                                 unsigned seed) {
  const int own = group.rank();
  std::vector<Bytes> inputs;
  std::vector<Buffer> ins;
  std::vector<void*> in_pointers;
  for (int peer = 0; peer < group.size(); ++peer) {
    inputs.push_back(part(from, counts[own], seed, peer, own));
    ins.emplace_back(part(from, counts[peer], seed, own, peer));
  }
  const auto sum = summing(group, from, op, to);
  Buffer out(counts[own] * shm::element_size(to));
  shm::reduce_scatter(group, pointers(ins, in_pointers), out.data(), counts.data(), sum, in_seconds(kLong));
  const std::string what = describe(group, "reduce_scatter", counts[own], seed);
  out.expect(folded(inputs, counts[own], sum.reduction), what);
  for (int peer = 0; peer < group.size(); ++peer)
    ins[peer].expect(part(from, counts[peer], seed, own, peer), what + ", input");
}

inline void check_reduce(Group& group, Type from, Op op, Type to, int64_t count, int root, unsigned seed) {
  std::vector<Bytes> inputs;
  for (int peer = 0; peer < group.size(); ++peer) inputs.push_back(part(from, count, seed, peer));
  const auto sum = summing(group, from, op, to);
  const std::string what = describe(group, "reduce", count, seed);
  Buffer in(inputs[group.rank()]), out(count * shm::element_size(to));
  const bool in_place = from == to && seed % 2 == 0 && group.rank() == root;
  shm::reduce(group, in.data(), in_place ? in.data() : out.data(), count, sum, root, in_seconds(kLong));
  if (group.rank() == root) (in_place ? in : out).expect(folded(inputs, count, sum.reduction), what);
  if (!in_place) in.expect(inputs[group.rank()], what + ", input");
  if (group.rank() != root) out.expect_untouched(what + ", out");
}

inline void check_all_gather(Group& group, const std::vector<int64_t>& bytes, unsigned seed) {
  const int own = group.rank();
  const bool in_place = seed % 2 == 0;
  Buffer in(bytes_part(bytes[own], seed, own));
  std::vector<Buffer> outs;
  for (int peer = 0; peer < group.size(); ++peer) outs.emplace_back(bytes[peer]);
  if (in_place) outs[own] = in;
  std::vector<void*> out_pointers;
  pointers(outs, out_pointers);
  shm::all_gather(group, in_place ? outs[own].data() : in.data(), out_pointers.data(), bytes.data(),
                  in_seconds(kLong));
  for (int peer = 0; peer < group.size(); ++peer)
    outs[peer].expect(bytes_part(bytes[peer], seed, peer), describe(group, "all_gather", bytes[peer], seed));
}

inline void check_gather(Group& group, int64_t bytes, int root, unsigned seed) {
  Buffer in(bytes_part(bytes, seed, group.rank()));
  std::vector<Buffer> outs(group.size(), Buffer(bytes));
  std::vector<void*> out_pointers;
  pointers(outs, out_pointers);
  const bool reads = group.rank() == root;
  shm::gather(group, in.data(), reads ? out_pointers.data() : nullptr, bytes, root, in_seconds(kLong));
  const std::string what = describe(group, "gather", bytes, seed);
  in.expect(bytes_part(bytes, seed, group.rank()), what + ", input");
  for (int peer = 0; reads && peer < group.size(); ++peer)
    outs[peer].expect(bytes_part(bytes, seed, peer), what);
}

inline void check_scatter(Group& group, int64_t bytes, int root, unsigned seed) {
  std::vector<Buffer> ins;
  for (int peer = 0; peer < group.size(); ++peer) ins.emplace_back(bytes_part(bytes, seed, root, peer));
  std::vector<void*> in_pointers;
  pointers(ins, in_pointers);
  Buffer out(bytes);
  const bool writes = group.rank() == root;
  shm::scatter(group, writes ? in_pointers.data() : nullptr, out.data(), bytes, root, in_seconds(kLong));
  out.expect(bytes_part(bytes, seed, root, group.rank()), describe(group, "scatter", bytes, seed));
}

inline void check_broadcast(Group& group, int64_t bytes, int root, unsigned seed) {
  Buffer data(bytes_part(bytes, seed, group.rank()));
  shm::broadcast(group, data.data(), bytes, root, in_seconds(kLong));
  data.expect(bytes_part(bytes, seed, root), describe(group, "broadcast", bytes, seed));
}

using Sizes = std::function<int64_t(int from, int to)>;

inline void check_all_to_all(Group& group, const Sizes& bytes, unsigned seed) {
  const int own = group.rank();
  std::vector<Buffer> ins, outs;
  std::vector<int64_t> in_bytes, out_bytes;
  std::vector<void*> in_pointers, out_pointers;
  for (int peer = 0; peer < group.size(); ++peer) {
    in_bytes.push_back(bytes(own, peer));
    out_bytes.push_back(bytes(peer, own));
    ins.emplace_back(bytes_part(in_bytes[peer], seed, own, peer));
    outs.emplace_back(out_bytes[peer]);
  }
  shm::all_to_all(group, pointers(ins, in_pointers), in_bytes.data(), pointers(outs, out_pointers),
                  out_bytes.data(), in_seconds(kLong));
  for (int peer = 0; peer < group.size(); ++peer) {
    const std::string what = describe(group, "all_to_all", out_bytes[peer], seed);
    outs[peer].expect(bytes_part(out_bytes[peer], seed, peer, own), what);
    ins[peer].expect(bytes_part(in_bytes[peer], seed, own, peer), what + ", input");
  }
}

}  // namespace gossamer::test
