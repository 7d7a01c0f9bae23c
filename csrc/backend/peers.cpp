// See peers.h. torch finds a group by its name whenever it needs one. So a group that cannot communicate is registered:
// it has a store, a rank and a size.
#include "backend/peers.h"

#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <atomic>
#include <utility>

#include "device_kernels.h"
#include "errors.h"

namespace gossamer {

namespace symm = c10d::symmetric_memory;

namespace {

constexpr size_t kOfTorch = 128;  // words of a signal pad that torch's own channel 0 may use

}  // namespace

PeerBlock::PeerBlock(const at::Tensor& memory, c10::intrusive_ptr<symm::SymmetricMemory> handle,
                     int64_t timeout_ms)
    : handle_(std::move(handle)),
      storage_(memory.storage().getWeakStorageImpl()),
      bytes_(static_cast<int64_t>(memory.nbytes())),
      timeout_ms_(timeout_ms) {
  for (void* base : handle_->get_buffer_ptrs()) bases_.push_back(static_cast<uint8_t*>(base));
  if (device_kernels(memory.device().type()).meet == nullptr) return;
  const size_t needed = (kOfTorch + flat::kMeetingWords) * sizeof(uint32_t);
  check_argument(handle_->get_signal_pad_size() >= needed, "symmetric memory: torch's signal pads must have ",
                 needed, " bytes, got ", handle_->get_signal_pad_size(), "; call no set_signal_pad_size()");
  for (void* pad : handle_->get_signal_pad_ptrs()) pads_.push_back(static_cast<uint32_t*>(pad) + kOfTorch);
  missing_ = at::full({1}, -1, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
}

PeerBlock::~PeerBlock() = default;
PeerBlock::PeerBlock(PeerBlock&&) noexcept = default;
PeerBlock& PeerBlock::operator=(PeerBlock&&) noexcept = default;

bool PeerBlock::holds(const at::Tensor& x) const {
  return is_in_use() && x.storage().unsafeGetStorageImpl() == storage_._unsafe_get_target();
}

void PeerBlock::meet() {
  constexpr int kChannel = 0;  // one collective at a time
  if (pads_.empty()) return handle_->barrier(kChannel, static_cast<size_t>(timeout_ms_));
  device_kernels(handle_->get_device().type())
      .meet({pads_.data(), handle_->get_rank(), handle_->get_world_size(), timeout_ms_,
             missing_.data_ptr<int>()});
}

std::optional<int> PeerBlock::missing() const {
  const int rank = missing_.defined() ? *static_cast<const volatile int*>(missing_.data_ptr<int>()) : -1;
  return rank < 0 ? std::nullopt : std::optional<int>(rank);
}

void PeerBlock::leak() noexcept { (void)handle_.release(); }

PeerGroup::PeerGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, at::Device device,
                     const c10::intrusive_ptr<c10d::Backend>& backend, int64_t timeout_ms)
    : group_(c10::make_intrusive<c10d::ProcessGroup>(std::move(store), rank, size)),
      device_(device),
      timeout_ms_(timeout_ms) {
  const auto allocator = symm::get_backend(device);
  const std::string wanted = device.is_cpu() ? "gossamer" : "CUDA";
  check_argument(allocator == wanted, "symmetric memory: torch must use its allocator '", wanted, "' on ",
                 device, ", got '", allocator.value_or("none"),
                 "'; unset TORCH_SYMMMEM, and call no set_backend()");
  // The number is this process's alone: what the ranks have in common is the store.
  static std::atomic<int64_t> count{0};
  name_ = "gossamer/peers" + std::to_string(count++);
  if (backend) {
    group_->setBackend(device.type(), c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  group_->setGroupName(name_);
  c10d::register_process_group(name_, group_);
}

PeerGroup::~PeerGroup() { c10d::unregister_process_group(name_); }

at::Tensor PeerGroup::reserve(int64_t bytes) const {
  auto memory = symm::empty_strided_p2p({bytes}, {1}, at::kByte, device_, name_, std::nullopt);
  return memory.zero_();
}

PeerBlock PeerGroup::join(const at::Tensor& memory) const {
  auto handle = symm::rendezvous(memory, name_);
  check_argument(handle.defined(), "symmetric memory: torch does not know the memory that it allocated");
  return {memory, std::move(handle), timeout_ms_};
}

}  // namespace gossamer
