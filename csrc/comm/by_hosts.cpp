// See by_hosts.h.
#include "comm/by_hosts.h"

#include <algorithm>
#include <utility>

#include "backend/across.h"

namespace gossamer {

ByHosts::ByHosts(CommunicatorPtr world, CommunicatorPtr inside, CommunicatorPtr across,
                 std::vector<std::vector<int>> hosts)
    : Forwarding(std::move(world)),
      inside_(std::move(inside)),
      across_(std::move(across)),
      hosts_(std::move(hosts)) {
  const auto smaller = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  const auto [least, most] = std::minmax_element(hosts_.begin(), hosts_.end(), smaller);
  carriers_ = static_cast<int64_t>(least->size());
  largest_ = static_cast<int64_t>(most->size());
}

void ByHosts::set_call(CallAcross* call) {
  call_ = call;
  if (across_) across_->set_call(call);
}

void ByHosts::end_call() {
  if (call_ != nullptr) call_->end();
}

void ByHosts::set_timeout(std::chrono::milliseconds timeout) {
  for (Communicator* level : {other_.get(), inside_.get(), across_.get()})
    if (level != nullptr) level->set_timeout(timeout);
}

std::string ByHosts::capture_refusal() const {
  for (const Communicator* level : {other_.get(), inside_.get(), across_.get()}) {
    if (level == nullptr) continue;
    if (auto refusal = level->capture_refusal(); !refusal.empty()) return refusal;
  }
  return "";
}

void ByHosts::announce_failure(const std::string& what) noexcept {
  const std::string known = trouble();
  known.empty() ? Communicator::announce_failure(what) : tell(known);
}

void ByHosts::tell(const std::string& text) noexcept {
  for (Communicator* level : {other_.get(), inside_.get(), across_.get()})
    if (level != nullptr) level->tell(text);
}

void ByHosts::abort() {
  for (Communicator* level : {other_.get(), inside_.get(), across_.get()})
    if (level != nullptr) level->abort();
}

std::string ByHosts::trouble() noexcept {
  for (Communicator* level : {inside_.get(), across_.get(), other_.get()}) {
    if (level == nullptr) continue;
    if (auto known = level->trouble(); !known.empty()) return known;
  }
  return {};
}

uint64_t ByHosts::bytes_sent() const {
  return Communicator::bytes_sent() + other_->bytes_sent() + inside_->bytes_sent() + bytes_across();
}

uint64_t ByHosts::bytes_received() const {
  return Communicator::bytes_received() + other_->bytes_received() + inside_->bytes_received() +
         (across_ ? across_->bytes_received() : 0);
}

}  // namespace gossamer
