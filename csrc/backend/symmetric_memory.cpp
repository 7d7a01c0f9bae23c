// The allocator and the SymmetricMemory that it hands out; see symmetric_memory.h. A block is anonymous memory of
// this process, followed by torch's signal pad. After rendezvous all ranks of a group map each other's blocks.
#include "backend/symmetric_memory.h"

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <map>
#include <thread>

#include "backend/backend.h"
#include "backend/gil.h"
#include "errors.h"
#include "shm/pieces.h"

namespace gossamer {
namespace {

namespace symm = c10d::symmetric_memory;

constexpr auto kForever = std::chrono::hours(24 * 365);

int64_t padded(size_t bytes) { return shm::ceil_div(static_cast<int64_t>(bytes), shm::kLine) * shm::kLine; }

class CpuSymmetricMemory : public symm::SymmetricMemory {
 public:
  CpuSymmetricMemory(c10::intrusive_ptr<GossamerBackend> backend, std::shared_ptr<shm::Shared> shared,
                     size_t bytes)
      : backend_(std::move(backend)), shared_(std::move(shared)), bytes_(bytes) {
    for (void* base : shared_->bases()) {
      buffers_.push_back(base);
      pads_.push_back(shm::at(base, padded(bytes)));
    }
    for (int rank = 0; rank < backend_->getSize(); ++rank) ranks_.push_back(rank);
  }

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pads_; }
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pads_.data(); }
  size_t get_buffer_size() override { return bytes_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return backend_->getRank(); }
  int get_world_size() override { return backend_->getSize(); }
  c10::Device get_device() override { return c10::Device(c10::DeviceType::CPU); }
  const std::vector<int>& get_rank_to_global_rank() override { return ranks_; }
  bool world_within_direct_access() override { return true; }

  // Each word of the pad belongs to one sender and channel; 0 means that there is no signal.
  void put_signal(int to, int channel, size_t timeout_ms) override {
    auto& word = signal(to, get_rank(), channel);
    wait_until("put_signal", to, channel, timeout_ms, [&word] {
      uint32_t empty = 0;
      return word.compare_exchange_strong(empty, 1);
    });
  }

  void wait_signal(int from, int channel, size_t timeout_ms) override {
    auto& word = signal(get_rank(), from, channel);
    wait_until("wait_signal", from, channel, timeout_ms, [&word] {
      uint32_t full = 1;
      return word.compare_exchange_strong(full, 0);
    });
  }

  void barrier(int channel, size_t timeout_ms) override {
    for (int peer = 0; peer < get_world_size(); ++peer) {
      if (peer != get_rank()) put_signal(peer, channel, timeout_ms);
    }
    for (int peer = 0; peer < get_world_size(); ++peer) {
      if (peer != get_rank()) wait_signal(peer, channel, timeout_ms);
    }
  }

 private:
  std::atomic<uint32_t>& signal(int at_rank, int from, int channel) {
    const int64_t index = int64_t{channel} * get_world_size() + from;
    const bool inside = at_rank >= 0 && at_rank < get_world_size() && from >= 0 && from < get_world_size() &&
                        channel >= 0 && (index + 1) * 4 <= static_cast<int64_t>(symm::get_signal_pad_size());
    check_argument(inside, "symmetric memory: a signal pad of ", symm::get_signal_pad_size(),
                   " bytes has no channel ", channel, " from rank ", from, " to rank ", at_rank);
    return static_cast<std::atomic<uint32_t>*>(pads_[at_rank])[index];
  }

  template <class Attempt>
  void wait_until(const char* what, int peer, int channel, size_t timeout_ms, Attempt attempt) {
    const WithoutGil without_gil;  // torch calls with the GIL held
    const auto deadline = shm::Clock::now() + (timeout_ms ? std::chrono::milliseconds(timeout_ms)
                                                          : std::chrono::milliseconds(kForever));
    for (int tries = 0; !attempt(); ++tries) {
      const std::string trouble = tries % 64 == 0 ? backend_->trouble(peer) : std::string();
      if (!trouble.empty() || shm::Clock::now() > deadline) {
        raise_python(ErrorKind::comm, "symmetric memory: ", what, " with rank ", backend_->name_of(peer),
                     ", channel ", channel, ": ",
                     trouble.empty() ? "Timed out after " + std::to_string(timeout_ms) + " ms" : trouble);
      }
      tries < 100 ? std::this_thread::yield() : std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  c10::intrusive_ptr<GossamerBackend> backend_;
  std::shared_ptr<shm::Shared> shared_;
  size_t bytes_;
  std::vector<void*> buffers_;
  std::vector<void*> pads_;
  std::vector<int> ranks_;
};

class CpuAllocator : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int, const std::optional<std::string>& group_name) override {
    auto block =
        std::make_shared<shm::Block>(padded(size) + static_cast<int64_t>(symm::get_signal_pad_size()));
    void* data = block->mapping.data();
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_[data] = Entry{std::move(block), size, group_name, {}};
    return data;
  }

  void free(void* data) override {
    Entry entry;  // freed after the lock is released
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(data);
    if (found == entries_.end()) return;
    entry = std::move(found->second);
    entries_.erase(found);
  }

  size_t get_alloc_size(void* data) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entry_of(data).bytes;
  }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(
      void* data, const std::optional<std::string>& group_name) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = entries_.find(data);
    if (found == entries_.end()) return nullptr;  // to torch this means: not symmetric memory
    const Entry entry = found->second;
    lock.unlock();
    const auto& name = group_name ? group_name : entry.group_name;
    check_argument(name.has_value(), "symmetric memory: rendezvous needs the name of a group, got none");
    const auto backend = find_backend(*name);
    const auto known = entry.handles.find(backend.get());
    if (known != entry.handles.end()) return known->second;
    auto handle = c10::make_intrusive<CpuSymmetricMemory>(backend, backend->share(entry.block), entry.bytes);
    lock.lock();
    entry_of(data).handles[backend.get()] = handle;
    return handle;
  }

  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::DeviceType::CPU; }
  std::string name() override { return "gossamer"; }
  bool has_allocation(void* data) {  // overrides a method that torch has from 2.13 on
    const std::lock_guard<std::mutex> lock(mutex_);
    return entries_.count(data) > 0;
  }

 private:
  struct Entry {
    std::shared_ptr<shm::Block> block;
    size_t bytes;
    std::optional<std::string> group_name;
    // They keep their backends.
    std::map<const GossamerBackend*, c10::intrusive_ptr<symm::SymmetricMemory>> handles;
  };

  Entry& entry_of(void* data) {
    const auto found = entries_.find(data);
    check_argument(found != entries_.end(),
                   "symmetric memory: the tensor was not allocated as symmetric memory");
    return found->second;
  }

  std::mutex mutex_;
  std::map<void*, Entry> entries_;
};

}  // namespace

void register_symmetric_memory() {
  symm::register_allocator(c10::DeviceType::CPU, c10::make_intrusive<CpuAllocator>());
}

}  // namespace gossamer
