// The side of negotiator.h that users' threads call: names, checks at submission, the queue.
#include <unistd.h>

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
  const bool ends_era = request.kind == Kind::barrier || request.kind == Kind::join;
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
    for (size_t i = 0; i < operations.size(); ++i) {
      const Request& request = operations[i].request;
      const std::string& wanted =
          request.name.empty() && !moves_data(request.kind) ? name(request.kind) : request.name;
      const auto other = in_flight_.find(wanted);
      bool repeated = false;
      for (size_t j = 0; j < i; ++j)
        repeated = repeated || (!wanted.empty() && operations[j].request.name == wanted);
      GOSSAMER_CHECK(other == in_flight_.end() && !repeated, ErrorKind::config, "negotiate: '", wanted,
                     "' must not be submitted again while it is in flight",
                     request.call_site.empty() ? "" : ", got ", request.call_site,
                     other == in_flight_.end() || other->second->request.call_site.empty()
                         ? ""
                         : " and before that " + other->second->request.call_site,
                     "; wait for it, or give another name");
    }
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
    const size_t before = queue_.size();
    for (Operation& operation : operations) {
      if (!refusal.empty()) {  // the caller gets it now, the other ranks by the negotiation
        operation.request.refusal = refusal;
        operation.done = nullptr;
        operation.payload = nullptr;
      }
      trace(Phase::submitted, operation.request.name, rank_);
      queue_.push_back(std::make_shared<Operation>(std::move(operation)));
      in_flight_[queue_.back()->request.name] = queue_.back();
    }
    wakes = before < wake_at_ && queue_.size() >= wake_at_;
    counters_.submitted += operations.size();
  }
  if (wakes) transport_->wake();
  if (!refusal.empty()) throw Error(ErrorKind::config, refusal);
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
