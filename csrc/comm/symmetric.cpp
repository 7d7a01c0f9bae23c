// See symmetric.h.
#include "comm/symmetric.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "backend/gil.h"
#include "comm/device_wait.h"
#include "device_kernels.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr int64_t kAlignmentBytes = 16;
constexpr int64_t kTextBytes = 400;  // of the problem that a rank tells the others

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

SymmetricCommunicator::SymmetricCommunicator(CommunicatorPtr other, CommunicatorPtr control,
                                             std::unique_ptr<PeerGroup> group)
    : Forwarding(std::move(other)), control_(std::move(control)), group_(std::move(group)) {}

SymmetricCommunicator::~SymmetricCommunicator() {
  const WithoutGil without_gil;
  if (failed_ && host_timeout_) {  // the device has not stopped: it waits for nobody any more
    give_up_meetings();
    failed_ = false;
  }
  // torch synchronises the device before it unmaps memory, and ends the process if that fails.
  if (!failed_ && !device().is_cpu()) {
    try {
      c10::impl::VirtualGuardImpl(device().type()).synchronizeDevice(device().index());
    } catch (const std::exception&) {
      failed_ = true;
    }
  }
  if (failed_)
    for (auto& [base, block] : blocks_) block.leak();
  route_.reset();  // whose memory is of blocks_
}

void SymmetricCommunicator::abort() {
  other_->abort();
  if (!device().is_cpu()) give_up_meetings();
}

void SymmetricCommunicator::wait_on_host(std::chrono::milliseconds timeout) {
  other_->wait_on_host(timeout);
  // Before the device stops by itself, and with it all that this process could do on it.
  if (!device().is_cpu()) host_timeout_ = timeout * 9 / 10;
}

void SymmetricCommunicator::wait_for_device() {
  if (!host_timeout_) return;
  const auto abort = [this] { give_up_meetings(); };
  gossamer::wait_for_device(device(), {*host_timeout_, failed_, [this] { return trouble(); }, abort});
}

void SymmetricCommunicator::give_up_meetings() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [base, block] : blocks_) block.give_up();
}

void SymmetricCommunicator::tell(const std::string& text) noexcept {
  failed_ = true;
  other_->tell(text);
  control_->tell(text);
  if (!device().is_cpu()) give_up_meetings();
}

std::string SymmetricCommunicator::trouble() noexcept {
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [base, block] : blocks_) {
      if (const auto rank = block.missing())
        return "rank " + std::to_string(*rank) + " did not come to a meeting of the GPUs in time";
    }
  } catch (const std::exception&) {
    return {};
  }
  auto known = other_->trouble();
  return known.empty() ? control_->trouble() : known;
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
  raise_python(ErrorKind::comm, kind(), " of ", readable_bytes(bytes), " on ", device(),
               " could not be shared", text.str());
}

void SymmetricCommunicator::require_no_capture(int64_t bytes) const {
  const c10::OptionalDeviceGuard guard(device());
  if (!device_kernels(device().type()).is_capturing()) return;
  raise_python(ErrorKind::config, kind(), " of ", readable_bytes(bytes),
               " is needed while a CUDA graph is captured; run the same step before capturing it");
}

std::pair<at::Tensor, PeerBlock> SymmetricCommunicator::new_block(int64_t bytes) {
  const c10::OptionalDeviceGuard guard(device());
  std::optional<PeerBlock> block;
  at::Tensor memory;
  // If this rank fails, the others must not stay in torch's rendezvous: so the ranks agree before it, and after it.
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
  std::map<const void*, PeerBlock> unused;  // freed after the mutex is released: torch waits for the device
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

template <class Part>
void SymmetricCommunicator::together(int64_t bytes, const Part& part) {
  std::string problem;
  try {
    part();
    if (!device().is_cpu()) c10::impl::VirtualGuardImpl(device().type()).synchronizeDevice(device().index());
  } catch (const std::exception& error) {
    problem = first_line(error.what());
  }
  agree(bytes, problem);
}

std::vector<int> SymmetricCommunicator::unreached_peers() {
  const c10::OptionalDeviceGuard guard(device());
  const int64_t n = size(), bytes = (n + 1) * static_cast<int64_t>(sizeof(int64_t));
  const at::Tensor memory = allocate_shared(bytes);  // one number from each rank, and one for all to read
  const auto& bases = peers_of(memory)->bases();
  const auto numbers_of = [&](int64_t peer) {
    return at::for_blob(bases.at(static_cast<size_t>(peer)), {n + 1})
        .options(at::TensorOptions().dtype(at::kLong).device(device()))
        .target_device(device())
        .make_tensor();
  };
  const auto number = [n](int64_t from, int64_t to) { return 0x676f73 + from * (n + 1) + to; };
  together(bytes, [&] {
    for (int64_t peer = 0; peer < n; ++peer) numbers_of(peer)[rank()].fill_(number(rank(), peer));
    numbers_of(rank())[n].fill_(number(rank(), n));
  });
  std::vector<int> unreached;
  together(bytes, [&] {
    // add(0): a kernel reads, as it does in a sum. torch's copies would ask whether the memory is the host's.
    const at::Tensor arrived = numbers_of(rank()).add(0).cpu();
    for (int peer = 0; peer < n; ++peer) {
      const auto read = numbers_of(peer)[n].add(0).item<int64_t>();
      if (arrived[peer].item<int64_t>() != number(peer, rank()) || read != number(peer, n))
        unreached.push_back(peer);
    }
  });
  return unreached;
}

// Entries of the map keep their address as long as they exist.
PeerBlock* SymmetricCommunicator::peers_of(const at::Tensor& x) {
  free_unused();  // frees the memory of an earlier plan in the first step of a new one
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.upper_bound(x.data_ptr());
  if (found == blocks_.begin()) return nullptr;
  --found;
  return found->second.holds(x) ? &found->second : nullptr;
}

}  // namespace gossamer
