// See cache.h.
#include "negotiate/cache.h"

namespace gossamer::negotiate {

int32_t Cache::find(const Request& request) const {
  const auto found = slots_.find(request.name);
  if (found == slots_.end()) return -1;
  return same(*entries_[found->second].own, request) ? found->second : -1;
}

const std::shared_ptr<const Response>& Cache::at(int32_t slot) const {
  const bool cached = slot >= 0 && slot < static_cast<int32_t>(entries_.size()) && entries_[slot].response;
  GOSSAMER_CHECK(cached, ErrorKind::comm, "negotiate: rank 0 runs the cached operation ", slot,
                 ", which this rank does not have; do all ranks run the same version?");
  return entries_[slot].response;
}

void Cache::store(std::shared_ptr<const Response> response, std::shared_ptr<const Request> own) {
  const int32_t slot = response->slot;
  drop(slot);
  if (slot >= static_cast<int32_t>(entries_.size())) entries_.resize(slot + 1);
  slots_[own->name] = slot;
  entries_[slot] = {std::move(response), std::move(own)};
}

void Cache::drop(int32_t slot) {
  if (slot < 0 || slot >= static_cast<int32_t>(entries_.size()) || !entries_[slot].response) return;
  slots_.erase(entries_[slot].own->name);
  entries_[slot] = {};
}

bool Slots::current(int32_t slot, uint64_t seen) const {
  return slot < static_cast<int32_t>(slots_.size()) && slots_[slot].response && seen >= slots_[slot].changed;
}

void Slots::use(int32_t slot, uint64_t sequence) {
  slots_[slot].used = sequence;
  slots_[slot].waits = false;
}

void Slots::release(const std::string& name) {
  if (const auto known = names_.find(name); known != names_.end()) slots_[known->second].waits = false;
}

int32_t Slots::place(const std::string& name, uint64_t sequence) {
  if (const auto known = names_.find(name); known != names_.end()) return known->second;
  if (!free_.empty()) {
    const int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  if (static_cast<int>(slots_.size()) < capacity_) {
    slots_.emplace_back();
    return static_cast<int32_t>(slots_.size()) - 1;
  }
  int32_t oldest = -1;
  for (int32_t slot = 0; slot < static_cast<int32_t>(slots_.size()); ++slot) {
    if (slots_[slot].waits || slots_[slot].used == sequence) continue;
    if (oldest < 0 || slots_[slot].used < slots_[oldest].used) oldest = slot;
  }
  return oldest;
}

void Slots::store(const std::shared_ptr<Response>& response, Requests requests, uint64_t sequence) {
  const int32_t slot = place(response->request.name, sequence);
  if (slot < 0) return;
  if (slots_[slot].response) names_.erase(slots_[slot].response->request.name);
  names_[response->request.name] = slot;
  response->slot = slot;
  slots_[slot] = {response, std::move(requests), sequence, sequence, false};
}

int32_t Slots::drop(const std::string& name, uint64_t sequence) {
  const auto known = names_.find(name);
  if (known == names_.end()) return -1;
  const int32_t slot = known->second;
  names_.erase(known);
  slots_[slot] = {nullptr, {}, sequence, sequence, false};
  free_.push_back(slot);
  return slot;
}

}  // namespace gossamer::negotiate
