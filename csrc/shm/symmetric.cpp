// See symmetric.h.
#include "shm/symmetric.h"

#include "base/check.h"
#include "shm/pieces.h"

namespace gossamer::shm {

Shared::Shared(Group& group, std::shared_ptr<Block> own, int64_t id, Deadline deadline)
    : own_(std::move(own)), id_(id) {
  const auto bytes = own_->mapping.bytes();
  auto fds = group.share(own_->mapping.fd(), static_cast<int64_t>(bytes), deadline);
  for (int peer = 0; peer < group.size(); ++peer) {
    if (peer == group.rank()) {
      bases_.push_back(own_->mapping.data());
      continue;
    }
    peers_.push_back(Mapping::attach(std::move(fds[peer]), bytes));
    peers_.back().close_fd();
    bases_.push_back(peers_.back().data());
  }
}

void Windows::add(const std::shared_ptr<Shared>& shared) {
  const std::lock_guard<std::mutex> lock(mutex_);
  entries_[shared->own().mapping.data()] = shared;
}

Window Windows::find(const void* data, int64_t bytes, std::shared_ptr<Shared>& keep,
                     std::vector<void*>& peers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (entries_.empty() || bytes == 0) return {};
  auto entry = entries_.upper_bound(static_cast<const uint8_t*>(data));
  if (entry == entries_.begin()) return {};
  --entry;
  keep = entry->second.lock();
  if (!keep) {
    entries_.erase(entry);
    return {};
  }
  const int64_t offset = static_cast<const uint8_t*>(data) - entry->first;
  if (offset + bytes > static_cast<int64_t>(keep->own().mapping.bytes())) return {};
  for (void* base : keep->bases()) peers.push_back(at(base, offset));
  return {keep->id(), offset, peers.data()};
}

}  // namespace gossamer::shm
