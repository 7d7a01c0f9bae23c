// Ranks whose devices cannot read each other's memory, as processes with an emulated device each: they sum by rows in memory of
// the host (csrc/backend/peers.cpp does so for torch). A program of its own, since a process that knows a GPU must not fork.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>

#include "codec/cuda.h"
#include "codec_support.h"
#include "flat/cuda.h"
#include "shm/memory.h"

namespace gossamer::test {
namespace {

class HostMemory : public testing::Test {};

constexpr int64_t kPadBytes = 512;
constexpr int64_t kPatient = 10'000'000, kHasty = 10'000;  // ms by the clock of the emulator

// A block of one rank: a pad for meetings, then rows. All processes inherit all blocks.
using Blocks = std::vector<shm::Mapping>;

Blocks make_blocks(int size, int64_t bytes) {
  Blocks blocks;
  for (int rank = 0; rank < size; ++rank)
    blocks.push_back(shm::Mapping::create(static_cast<size_t>(kPadBytes + bytes)));
  return blocks;
}

// The blocks as this rank's device sees them.
class Mapped {
 public:
  Mapped(const Blocks& blocks, int rank) : blocks_(blocks), rank_(rank) {
    for (const auto& block : blocks)
      bases_.push_back(
          static_cast<uint8_t*>(flat::cuda::map_host(block.data(), static_cast<int64_t>(block.bytes()))));
  }
  ~Mapped() {
    for (const auto& block : blocks_) flat::cuda::unmap_host(block.data());
  }
  Mapped(const Mapped&) = delete;

  uint8_t* own(int64_t offset) const { return bases_[rank_] + kPadBytes + offset; }
  std::vector<const uint8_t*> rows(int64_t offset) const {
    std::vector<const uint8_t*> all;
    for (const uint8_t* base : bases_) all.push_back(base + kPadBytes + offset);
    return all;
  }
  void meet(int64_t timeout_ms, int* missing) const {
    std::vector<uint32_t*> pads;
    for (uint8_t* base : bases_) pads.push_back(reinterpret_cast<uint32_t*>(base));
    flat::cuda::meet({pads.data(), rank_, static_cast<int>(pads.size()), timeout_ms, missing}, nullptr);
  }

 private:
  const Blocks& blocks_;
  int rank_;
  std::vector<uint8_t*> bases_;
};

// Runs body(rank) in a process for each rank, and returns their exit codes. body returns whether all was right.
template <class Body>
std::vector<int> exit_codes(int size, const Body& body) {
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    processes.push_back(fork());
    if (processes.back() == 0) _exit(body(rank) ? 0 : 9);
  }
  std::vector<int> codes;
  for (const pid_t process : processes) {
    int status = 0;
    waitpid(process, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

struct Sum {
  Spec spec;
  int size;
  int64_t numel;
  Rows rows() const {
    const int64_t blocks = (numel + size * spec.block - 1) / (size * spec.block);
    return {size, blocks * spec.block, numel};
  }
  int64_t row_bytes() const { return codec::row_bytes(spec, rows().row_numel); }
  int64_t valid(int rank) const {
    return std::min(std::max<int64_t>(numel - rank * rows().row_numel, 0), rows().row_numel);
  }
  Bytes input(int rank, int call) const {
    return test::as_bytes(spec.dtype,
                          make_values(numel, Temper::ordinary, static_cast<unsigned>(100 * call + rank)));
  }
};

// The result by the CPU's kernels.
Bytes expected(const Sum& sum, int call) {
  const Kernels& host = *codec::kernels_by_name("scalar");
  const int64_t row = sum.row_bytes();
  std::vector<Bytes> sent;
  for (int rank = 0; rank < sum.size; ++rank) {
    sent.emplace_back(sum.size * row);
    host.encode(sum.spec, sum.spec.dtype, sum.input(rank, call).data(), sum.rows(), sent.back().data());
  }
  Bytes reduced(sum.size * row);
  std::vector<double> scratch(sum.rows().row_numel);
  for (int owner = 0; owner < sum.size; ++owner) {
    std::vector<const uint8_t*> each;
    for (const Bytes& wire : sent) each.push_back(wire.data() + owner * row);
    host.reduce_encode(sum.spec, codec::WireRows(each.data()), sum.size, sum.rows().row_numel,
                       sum.valid(owner), 0.5, reduced.data() + owner * row, scratch.data());
  }
  Bytes out(sum.numel * element_size(sum.spec.dtype));
  host.decode(sum.spec, reduced.data(), sum.rows(), out.data());
  return out;
}

// The calls of one rank. Each writes its rows where the call before had them, as route/peers.cpp does.
bool sums_as_expected(const Sum& sum, const Blocks& blocks, int rank) {
  constexpr int kCalls = 4;
  const Mapped memory(blocks, rank);
  const int64_t row = sum.row_bytes(), for_all = sum.size * row;
  int missing = -1;
  bool right = true;  // a rank that is wrong goes on, so that no other waits for it
  std::vector<double> scratch(sum.rows().row_numel);
  for (int call = 0; call < kCalls; ++call) {
    Bytes x = sum.input(rank, call);
    codec::cuda::encode(sum.spec, sum.spec.dtype, x.data(), sum.rows(), memory.own(0), nullptr);
    memory.meet(kPatient, &missing);
    const auto received = memory.rows(rank * row);
    codec::cuda::reduce_encode(sum.spec, codec::WireRows(received.data()), sum.size, sum.rows().row_numel,
                               sum.valid(rank), 0.5, memory.own(for_all), scratch.data(), nullptr);
    memory.meet(kPatient, &missing);
    const auto results = memory.rows(for_all);
    codec::cuda::decode(sum.spec, codec::WireRows(results.data()), sum.rows(), x.data(), nullptr);
    right = right && x == expected(sum, call) && missing == -1;
  }
  return right;
}

TEST_F(HostMemory, ranks_sum_in_memory_that_each_process_maps_to_the_bits_of_the_cpu) {
  for (const Kind kind : kKinds) {
    for (const int size : {2, 3, 4}) {
      for (const int64_t numel : {1, 257, 3001}) {
        const Sum sum{{kind, Dtype::f32, block_of(kind, 256)}, size, numel};
        const Blocks blocks = make_blocks(size, (size + 1) * sum.row_bytes());
        const auto codes = exit_codes(size, [&](int rank) { return sums_as_expected(sum, blocks, rank); });
        ASSERT_EQ(codes, std::vector<int>(size, 0))
            << "codec " << static_cast<int>(kind) << ", " << size << " ranks, " << numel << " elements";
      }
    }
  }
}

TEST_F(HostMemory, a_rank_that_is_gone_is_named_and_the_others_do_not_wait_for_ever) {
  const Blocks blocks = make_blocks(3, 0);
  const auto said = shm::Mapping::create(3 * sizeof(int));
  auto* missing = reinterpret_cast<int*>(said.data());
  std::fill(missing, missing + 3, -1);
  const auto codes = exit_codes(3, [&](int rank) {
    if (rank == 1) return true;
    Mapped(blocks, rank).meet(kHasty, missing + rank);
    return true;
  });
  ASSERT_EQ(codes, (std::vector<int>{1, 0, 1}));  // 1: the kernel has stopped its device
  ASSERT_EQ(missing[0], 1);
  ASSERT_EQ(missing[2], 1);
}

TEST_F(HostMemory, memory_that_cannot_be_mapped_is_an_error_with_its_reason_and_can_be_mapped_later) {
  const auto block = shm::Mapping::create(8192);
  flat::cuda::map_host(block.data(), 8192);
  std::string text;
  try {
    flat::cuda::map_host(block.data(), 8192);
  } catch (const std::exception& error) {
    text = error.what();
  }
  ASSERT_EQ(text.find("map_host: cudaHostRegister of 8192 bytes failed: "), size_t{0}) << text;
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  flat::cuda::unmap_host(block.data());
  auto* seen = static_cast<uint8_t*>(flat::cuda::map_host(block.data(), 8192));
  seen[5000] = 7;
  ASSERT_EQ(block.data()[5000], 7);
  flat::cuda::unmap_host(block.data());
}

}  // namespace
}  // namespace gossamer::test
