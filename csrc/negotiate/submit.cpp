// The side of negotiator.h that user threads call: names, checks at submission, the queue.
#include <unistd.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "negotiate/negotiator.h"

namespace gossamer::negotiate {

void Negotiator::submit(Operation operation) {
  std::vector<Operation> operations;
  operations.push_back(std::move(operation));
  enqueue(std::move(operations), {});
}

void Negotiator::submit_group(std::vector<Operation> operations, std::string group) {
  GOSSAMER_CHECK(!operations.empty(), ErrorKind::config,
                 "negotiate: a group must have an operation, got none");
  if (group.empty()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    group = "group.noname." + std::to_string(era_) + "." + std::to_string(unnamed_["group"]++);
  }
  enqueue(std::move(operations), group);
}

void Negotiator::refuse(Request request, const std::string& reason) {
  request.refusal = reason.empty() ? "no reason given" : reason;
  submit({std::move(request), nullptr, nullptr, -1});
}

void Negotiator::give_name(Request& request) {
  const std::string kind = name(request.kind);
  const bool ends_era = request.kind == Collective::barrier || request.kind == Collective::join;
  if (ends_era) {
    request.era = era_++;
    unnamed_.clear();
  }
  if (!request.name.empty()) return;
  request.name = kind;
  if (!moves_data(request.kind)) return;  // one of these at a time
  request.era = era_;
  request.name += ".noname." + std::to_string(era_) + "." + std::to_string(unnamed_[kind]++);
}

// Throws if a name is in flight. A refused operation has nobody who could wait for its end; then sets `must_wait` instead.
void Negotiator::require_free(const std::vector<Operation>& operations, bool& must_wait) const {
  std::set<std::string_view> taken;
  for (const auto& flights : deferred_) {
    for (const Flight& flight : flights) taken.insert(flight->request.name);
  }
  const bool compares = operations.size() > 1 || !taken.empty();
  for (const Operation& operation : operations) {
    const Request& request = operation.request;
    if (request.name.empty() && moves_data(request.kind)) continue;  // it gets a number
    require_waited(request);
    const std::string kind = request.name.empty() ? name(request.kind) : "";
    const auto other = in_flight_.find(request.name.empty() ? kind : request.name);
    const bool waits = other != in_flight_.end() && !other->second->request.refusal.empty();
    must_wait = must_wait || waits;
    const std::string_view wanted =
        request.name.empty() ? name(request.kind) : std::string_view(request.name);
    if ((!compares || taken.insert(wanted).second) && (other == in_flight_.end() || waits)) continue;
    std::string sites = request.call_site.empty() ? "" : ", got " + request.call_site;
    if (other != in_flight_.end() && !other->second->request.call_site.empty()) {
      sites += " and before that " + other->second->request.call_site;
    }
    raise(ErrorKind::config, "negotiate: '", wanted, "' must not be submitted again while it is in flight",
          sites, "; wait for it, or give another name");
  }
}

// Throws if a name is complete but nobody has waited since it was submitted. Refusals pass: they must reach other ranks.
void Negotiator::require_waited(const Request& request) const {
  if (unwaited_since_ != waits_ || !request.refusal.empty()) return;
  const auto found = unwaited_.find(request.name);
  if (found == unwaited_.end()) return;
  raise(ErrorKind::config, "negotiate: '", request.name,
        "' must not be submitted twice without a wait in between, got ", request.call_site,
        " and before that ", found->second, "; wait for it, or give another name");
}

// Notes a complete operation. Under the mutex.
void Negotiator::keep_until_waited(const Operation& operation) {
  const Request& request = operation.request;
  if (unwaited_since_ != waits_) {
    unwaited_.clear();
    unwaited_since_ = waits_;
  }
  const bool named = moves_data(request.kind) && request.era < 0 && request.refusal.empty();
  if (named && operation.waits == unwaited_since_) unwaited_[request.name] = request.call_site;
}

// Queues the deferred operations that no refused one blocks. Returns whether the worker must be woken. Under the mutex.
bool Negotiator::release_deferred() {
  const size_t before = queue_.size();
  for (auto flights = deferred_.begin(); flights != deferred_.end();) {
    const bool blocked = std::any_of(flights->begin(), flights->end(), [&](const Flight& flight) {
      return in_flight_.count(flight->request.name) > 0;
    });
    if (blocked) {
      ++flights;
      continue;
    }
    for (Flight& flight : *flights) {
      in_flight_[flight->request.name] = flight;
      queue_.push_back(std::move(flight));
    }
    flights = deferred_.erase(flights);
  }
  return before < wake_at_ && queue_.size() >= wake_at_;
}

void Negotiator::enqueue(std::vector<Operation> operations, const std::string& group) {
  std::string refusal;
  bool wakes = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    GOSSAMER_CHECK(
        getpid() == owner_, ErrorKind::config,
        "negotiate: a forked child cannot use its parent's process sets; initialise after the fork");
    if (!ended_.empty()) throw Error(ErrorKind::comm, ended_);
    GOSSAMER_CHECK(!stopping_, ErrorKind::comm, "negotiate: ", self(), " has shut down");
    bool must_wait = false;
    require_free(operations, must_wait);
    for (Operation& operation : operations) {
      if (!group.empty()) {
        operation.request.group = group;
        operation.request.group_size = static_cast<int32_t>(operations.size());
      }
      if (refusal.empty() && operation.request.refusal.empty()) {
        refusal = complaint(operation.request, size_);
        if (!refusal.empty()) {
          refusal = std::string("negotiate: ") + name(operation.request.kind) + " '" +
                    operation.request.name + "': " + refusal;
        }
      }
      give_name(operation.request);
    }
    std::vector<Flight> flights;
    for (Operation& operation : operations) {
      if (!refusal.empty()) {  // the caller gets it now, the other ranks through the negotiation
        operation.request.refusal = refusal;
        operation.done = nullptr;
        operation.payload = nullptr;
      }
      operation.waits = waits_;
      trace(Phase::submitted, operation.request.name, rank_);
      flights.push_back(std::make_shared<Operation>(std::move(operation)));
    }
    counters_.submitted += flights.size();
    deferred_.push_back(std::move(flights));
    if (!must_wait) wakes = release_deferred();
  }
  if (wakes) transport_->wake();
  if (!refusal.empty()) throw Error(ErrorKind::config, refusal);
}

void Negotiator::hurry() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || queue_.size() >= wake_at_) return;  // the worker is on its way to them
    hurries_ = true;
  }
  transport_->wake();
}

void Negotiator::shutdown() {
  const std::lock_guard<std::mutex> joining(joining_);
  if (!thread_.joinable()) return;
  if (getpid() != owner_) return thread_.detach();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  transport_->wake();
  thread_.join();
}

Statistics Negotiator::statistics() const {
  return {counters_.submitted,     counters_.cached,    counters_.messages,
          counters_.message_bytes, counters_.decisions, counters_.batches};
}

}  // namespace gossamer::negotiate
