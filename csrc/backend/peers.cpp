// See peers.h. torch finds a group by its name whenever it needs one. So a group that cannot communicate is registered:
// it has a store, a rank and a size.
#include "backend/peers.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <atomic>
#include <utility>

#include "errors.h"

namespace gossamer {

namespace symm = c10d::symmetric_memory;

PeerBlock::PeerBlock(const at::Tensor& memory, c10::intrusive_ptr<symm::SymmetricMemory> handle,
                     int64_t timeout_ms)
    : handle_(std::move(handle)),
      storage_(memory.storage().getWeakStorageImpl()),
      bytes_(static_cast<int64_t>(memory.nbytes())),
      timeout_ms_(timeout_ms) {
  for (void* base : handle_->get_buffer_ptrs()) bases_.push_back(static_cast<uint8_t*>(base));
}

PeerBlock::~PeerBlock() = default;
PeerBlock::PeerBlock(PeerBlock&&) noexcept = default;
PeerBlock& PeerBlock::operator=(PeerBlock&&) noexcept = default;

bool PeerBlock::holds(const at::Tensor& x) const {
  return is_in_use() && x.storage().unsafeGetStorageImpl() == storage_._unsafe_get_target();
}

void PeerBlock::meet() {
  constexpr int kChannel = 0;  // one collective at a time
  handle_->barrier(kChannel, static_cast<size_t>(timeout_ms_));
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
