// See by_hosts.h.
#include "comm/by_hosts.h"

#include <algorithm>
#include <utility>

#include "backend/across.h"

namespace gossamer {

ByHosts::ByHosts(CommunicatorPtr world, CommunicatorPtr inside, CommunicatorPtr across,
                 std::vector<std::vector<int>> hosts, CommunicatorPtr back)
    : Forwarding(std::move(world)),
      inside_(std::move(inside)),
      across_(std::move(across)),
      back_(std::move(back)),
      hosts_(std::move(hosts)) {
  const auto smaller = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto [least, most] = std::minmax_element(hosts_.begin(), hosts_.end(), smaller);
  carriers_ = static_cast<int64_t>(least->size());
  largest_ = static_cast<int64_t>(most->size());
}

std::vector<Communicator*> ByHosts::levels() const {
  std::vector<Communicator*> levels;
  for (const CommunicatorPtr& level : {inside_, across_, other_, back_})
    if (level) levels.push_back(level.get());
  return levels;
}

void ByHosts::set_call(CallAcross* call) {
  call_ = call;
  if (across_) across_->set_call(call);
}

void ByHosts::end_call() {
  if (call_ != nullptr) call_->end();
}

void ByHosts::set_timeout(std::chrono::milliseconds timeout) {
  for (Communicator* level : levels()) level->set_timeout(timeout);
}

std::string ByHosts::capture_refusal() const {
  for (const Communicator* level : levels()) {
    if (auto refusal = level->capture_refusal(); !refusal.empty()) return refusal;
  }
  return "";
}

void ByHosts::announce_failure(const std::string& what) noexcept {
  const std::string known = trouble();
  known.empty() ? Communicator::announce_failure(what) : tell(known);
}

void ByHosts::tell(const std::string& text) noexcept {
  for (Communicator* level : levels()) level->tell(text);
}

void ByHosts::abort() {
  for (Communicator* level : levels()) level->abort();
}

std::string ByHosts::trouble() noexcept {
  for (Communicator* level : levels()) {
    if (auto known = level->trouble(); !known.empty()) return known;
  }
  return {};
}

uint64_t ByHosts::bytes_sent() const {
  uint64_t bytes = Communicator::bytes_sent();
  for (const Communicator* level : levels()) bytes += level->bytes_sent();
  return bytes;
}

uint64_t ByHosts::bytes_received() const {
  uint64_t bytes = Communicator::bytes_received();
  for (const Communicator* level : levels()) bytes += level->bytes_received();
  return bytes;
}

}  // namespace gossamer
