// See symmetric.h. The order of barriers: what a rank reads or writes in another's memory lies between two meetings, and
// between meetings no element is touched by two ranks.
#include "comm/symmetric.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "backend/gil.h"
#include "device_kernels.h"
#include "errors.h"
#include "float_dtype.h"
#include "observe/recorder.h"

namespace gossamer {
namespace {

constexpr int64_t kAlignmentBytes = 16;  // of what a rank sums, so that kernels move whole vectors
constexpr int64_t kTextBytes = 400;      // of what a rank tells the others

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

class Done : public Pending {
 public:
  void wait() override {}  // queued on the caller's stream, which its next work follows
};

}  // namespace

SymmetricCommunicator::SymmetricCommunicator(CommunicatorPtr other, CommunicatorPtr control,
                                             std::unique_ptr<PeerGroup> group)
    : other_(std::move(other)), control_(std::move(control)), group_(std::move(group)) {}

SymmetricCommunicator::~SymmetricCommunicator() {
  const WithoutGil without_gil;
  // torch synchronises the device before it unmaps memory, and ends the process if that fails.
  if (!failed_ && !device().is_cpu()) {
    try {
      c10::impl::VirtualGuardImpl(device().type()).synchronizeDevice(device().index());
    } catch (const std::exception&) {
      failed_ = true;
    }
  }
  if (!failed_) return;
  for (auto& [base, block] : blocks_) block.leak();
  if (rows_.block) rows_.block->leak();
}

void SymmetricCommunicator::announce_failure() noexcept {
  failed_ = true;
  other_->announce_failure();
}

void SymmetricCommunicator::agree(int64_t bytes, const std::string& problem) {
  const auto mine = at::zeros({kTextBytes}, at::kByte);
  std::memcpy(mine.data_ptr(), problem.data(), std::min<size_t>(problem.size(), kTextBytes - 1));
  const auto all = at::empty({size() * kTextBytes}, at::kByte);
  control_->all_gather(all, mine)->wait();
  std::ostringstream text;
  for (int peer = 0; peer < size(); ++peer) {
    const auto* theirs = reinterpret_cast<const char*>(all.data_ptr<uint8_t>() + peer * kTextBytes);
    if (*theirs != 0) text << "; rank " << peer << ": " << theirs;
  }
  if (text.str().empty()) return;
  throw PythonError(ErrorKind::comm, "symmetric memory of " + readable_bytes(bytes) + " on " +
                                         device().str() + " could not be shared" + text.str());
}

void SymmetricCommunicator::require_no_capture(int64_t bytes) const {
  const c10::OptionalDeviceGuard guard(device());
  if (!device_kernels(device().type()).is_capturing()) return;
  throw PythonError(ErrorKind::config,
                    "symmetric memory of " + readable_bytes(bytes) +
                        " is needed while a CUDA graph is captured; run the same step before capturing it");
}

std::pair<at::Tensor, PeerBlock> SymmetricCommunicator::new_block(int64_t bytes) {
  const c10::OptionalDeviceGuard guard(device());
  std::optional<PeerBlock> block;
  at::Tensor memory;
  // A rank that has failed must not leave the others in torch's rendezvous.
  for (const bool joining : {false, true}) {
    std::string problem;
    try {
      if (joining) {
        block.emplace(group_->join(memory));
      } else {
        memory = group_->reserve(bytes);
      }
    } catch (const std::exception& error) {
      problem = first_line(error.what());
    }
    agree(bytes, problem);
  }
  return {std::move(memory), std::move(*block)};
}

void SymmetricCommunicator::free_unused() {
  std::map<const void*, PeerBlock> unused;  // freed after the mutex is: torch waits for the device
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    const auto next = std::next(it);
    if (!it->second.is_in_use() && !device_kernels(device().type()).is_capturing()) {
      unused.insert(blocks_.extract(it));
    }
    it = next;
  }
}

at::Tensor SymmetricCommunicator::allocate(int64_t bytes) {
  require_no_capture(bytes);
  free_unused();
  auto [memory, block] = new_block(round_up(std::max<int64_t>(bytes, 1), kAlignmentBytes));
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.insert_or_assign(memory.data_ptr(), std::move(block));
  return memory.narrow(0, 0, bytes);
}

PeerBlock* SymmetricCommunicator::find(const at::Tensor& x) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.upper_bound(x.data_ptr());
  if (found == blocks_.begin()) return nullptr;
  --found;
  return found->second.holds(x) ? &found->second : nullptr;
}

// Rank j alone reads and writes chunk j, of every rank's memory.
bool SymmetricCommunicator::sum_in_place(const at::Tensor& x, double scale) {
  const auto dtype = float_dtype(x.scalar_type());
  if (!dtype || !x.is_contiguous()) return false;
  PeerBlock* block = find(x);
  if (block == nullptr) return false;
  const c10::OptionalDeviceGuard guard(device());
  free_unused();  // of an earlier plan of buckets, in the first step of a new one
  const int64_t n = size();
  const int64_t element_bytes = element_size(*dtype);
  const int64_t chunk = round_up((x.numel() + n - 1) / n, kAlignmentBytes / element_bytes);
  const int64_t begin = std::min(rank() * chunk, x.numel());
  const int64_t valid = std::min(chunk, x.numel() - begin);
  const int64_t offset = static_cast<uint8_t*>(x.data_ptr()) -
                         block->bases().at(static_cast<size_t>(rank())) + begin * element_bytes;
  std::vector<void*> rows;
  for (uint8_t* base : block->bases()) rows.push_back(base + offset);

  const int64_t moved = 2 * static_cast<int64_t>(x.nbytes()) * (n - 1) / n;
  observe::Flight flight("sum_in_place", moved);
  block->meet();
  device_kernels(device().type()).sum_rows(*dtype, rows.data(), n, valid, scale);
  block->meet();
  flight.posted();
  count(moved, moved);
  return true;
}

PendingPtr SymmetricCommunicator::all_reduce(at::Tensor x, ReduceOp op) {
  if (op == ReduceOp::sum && sum_in_place(x, 1.0)) return std::make_unique<Done>();
  return other_->all_reduce(std::move(x), op);
}

PeerRows SymmetricCommunicator::peer_rows(int64_t row_bytes) {
  if (row_bytes > rows_.row_bytes) {
    require_no_capture((size() + 1) * row_bytes);
    rows_ = Rows{};  // free the old memory before asking for the new
    auto [memory, block] = new_block((size() + 1) * row_bytes);
    rows_ = Rows{row_bytes, std::move(memory), std::move(block)};
  }
  const int64_t moved = 2 * (size() - 1) * row_bytes;
  count(moved, moved);
  return {&*rows_.block, size() * rows_.row_bytes};
}

}  // namespace gossamer
