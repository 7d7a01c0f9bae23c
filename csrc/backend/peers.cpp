// See peers.h. torch finds a group by its name whenever it needs one. So a group that cannot communicate is registered:
// it has a store, a rank and a size.
#include "backend/peers.h"

#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>
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

// Memory of the host at the address where the device's kernels see it, until the pointer is dropped.
std::shared_ptr<uint8_t> map_host(at::Device device, void* memory, int64_t bytes) {
  const auto& kernels = device_kernels(device.type());
  const auto unmap = [device, memory, &kernels](uint8_t*) {
    try {
      c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
      kernels.unmap_host(memory);
    } catch (const std::exception&) {
      // The device has failed, and with it all of its memory.
    }
  };
  return {static_cast<uint8_t*>(kernels.map_host(memory, bytes)), unmap};
}

}  // namespace

PeerBlock::PeerBlock(const at::Tensor& memory, c10::intrusive_ptr<symm::SymmetricMemory> handle,
                     at::Device device, int64_t timeout_ms)
    : device_(device),
      handle_(std::move(handle)),
      storage_(memory.storage().getWeakStorageImpl()),
      bytes_(static_cast<int64_t>(memory.nbytes())),
      timeout_ms_(timeout_ms) {
  for (void* base : handle_->get_buffer_ptrs()) bases_.push_back(static_cast<uint8_t*>(base));
  std::vector<uint8_t*> pads;
  for (void* pad : handle_->get_signal_pad_ptrs()) pads.push_back(static_cast<uint8_t*>(pad));
  for (size_t rank = 0; memory.device().type() != device_.type() && rank < bases_.size(); ++rank) {
    const int64_t before_pad = pads[rank] - bases_[rank];
    const auto pad_bytes = static_cast<int64_t>(handle_->get_signal_pad_size());
    mapped_.push_back(map_host(device_, bases_[rank], before_pad + pad_bytes));
    bases_[rank] = mapped_.back().get();
    pads[rank] = bases_[rank] + before_pad;
  }
  if (device_kernels(device_.type()).meet == nullptr) return;
  const size_t needed = (kOfTorch + kChannels * flat::kMeetingWords) * sizeof(uint32_t);
  check_argument(handle_->get_signal_pad_size() >= needed, "symmetric memory: torch's signal pads must have ",
                 needed, " bytes, got ", handle_->get_signal_pad_size(), "; call no set_signal_pad_size()");
  for (size_t channel = 0; channel < kChannels; ++channel) {
    auto& of_channel = pads_.emplace_back();
    for (uint8_t* pad : pads)
      of_channel.push_back(reinterpret_cast<uint32_t*>(pad) + kOfTorch + channel * flat::kMeetingWords);
  }
  missing_ = at::full({1}, flat::kNoneMissing, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
}

PeerBlock::~PeerBlock() = default;
PeerBlock::PeerBlock(PeerBlock&&) noexcept = default;
PeerBlock& PeerBlock::operator=(PeerBlock&&) noexcept = default;

bool PeerBlock::holds(const at::Tensor& x) const {
  return is_in_use() && x.storage().unsafeGetStorageImpl() == storage_._unsafe_get_target();
}

void PeerBlock::meet(int channel) {
  if (pads_.empty()) return handle_->barrier(channel, static_cast<size_t>(timeout_ms_));
  device_kernels(device_.type())
      .meet({pads_.at(static_cast<size_t>(channel)).data(), handle_->get_rank(), handle_->get_world_size(),
             timeout_ms_, missing_.data_ptr<int>()});
}

std::optional<int> PeerBlock::missing() const {
  const int rank = missing_.defined() ? *static_cast<const volatile int*>(missing_.data_ptr<int>()) : -1;
  return rank < 0 ? std::nullopt : std::optional<int>(rank);
}

void PeerBlock::give_up() noexcept {
  if (missing_.defined()) *static_cast<volatile int*>(missing_.data_ptr<int>()) = flat::kGivenUp;
}

void PeerBlock::leak() noexcept {
  (void)handle_.release();
  (void)new auto(std::move(mapped_));
  (void)new auto(std::move(missing_));
}

PeerGroup::PeerGroup(c10::intrusive_ptr<c10d::Store> store, int rank, int size, at::Device device,
                     const c10::intrusive_ptr<c10d::Backend>& backend, int64_t timeout_ms)
    : group_(c10::make_intrusive<c10d::ProcessGroup>(std::move(store), rank, size)),
      device_(device),
      memory_device_(backend ? at::Device(at::kCPU) : device),
      timeout_ms_(timeout_ms) {
  const auto allocator = symm::get_backend(memory_device_);
  const std::string wanted = memory_device_.is_cpu() ? "gossamer" : "CUDA";
  check_argument(allocator == wanted, "symmetric memory: torch must use its allocator '", wanted, "' on ",
                 memory_device_, ", got '", allocator.value_or("none"),
                 "'; unset TORCH_SYMMMEM, and call no set_backend()");
  // The number is this process's alone: what the ranks have in common is the store.
  static std::atomic<int64_t> count{0};
  name_ = "gossamer/peers" + std::to_string(count++);
  if (backend) {
    group_->setBackend(memory_device_.type(), c10d::ProcessGroup::BackendType::CUSTOM, backend);
  }
  group_->setGroupName(name_);
  c10d::register_process_group(name_, group_);
}

PeerGroup::~PeerGroup() { c10d::unregister_process_group(name_); }

at::Tensor PeerGroup::reserve(int64_t bytes) const {
  auto memory = symm::empty_strided_p2p({bytes}, {1}, at::kByte, memory_device_, name_, std::nullopt);
  return memory.zero_();
}

PeerBlock PeerGroup::join(const at::Tensor& memory) const {
  auto handle = symm::rendezvous(memory, name_);
  check_argument(handle.defined(), "symmetric memory: torch does not know the memory that it allocated");
  return {memory, std::move(handle), device_, timeout_ms_};
}

}  // namespace gossamer
