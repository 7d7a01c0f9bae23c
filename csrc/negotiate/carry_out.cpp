// The part of negotiator.h's worker thread that carries out decisions and ends the negotiation.
#include <utility>

#include "negotiate/negotiator.h"

namespace gossamer::negotiate {

void Negotiator::apply(Decision decision) {
  GOSSAMER_CHECK(decision.sequence == seen_ + 1, ErrorKind::comm, "negotiate: expected decision ", seen_ + 1,
                 ", got ", decision.sequence);
  seen_ = decision.sequence;
  ++counters_.decisions;
  std::vector<std::vector<Part>> batches;
  std::vector<int32_t> changed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Batch& batch : decision.batches) {
      batches.emplace_back();
      for (Run& run : batch) {
        for (int32_t slot = run.first_slot; slot < run.first_slot + run.slots; ++slot) {
          batches.back().push_back(resolve(cache_.at(slot), false));
        }
        for (Response& response : run.responses) {
          auto shared = std::make_shared<const Response>(std::move(response));
          const bool changes_cache = shared->slot >= 0;
          if (changes_cache) changed.push_back(shared->slot);
          batches.back().push_back(resolve(std::move(shared), changes_cache));
        }
      }
    }
  }
  std::vector<Flight> again;  // rank 0 ignores the bits of these, because their slots have changed
  for (const int32_t slot : changed) {
    if (static_cast<size_t>(slot) >= bit_flights_.size() || !bit_flights_[slot]) continue;
    again.push_back(std::exchange(bit_flights_[slot], nullptr));
  }
  announce(again);
  for (const auto& parts : batches) execute(parts);
}

Part Negotiator::resolve(std::shared_ptr<const Response> response, bool changes_cache) {
  const auto found = in_flight_.find(response->request.name);
  Part part{std::move(response), found == in_flight_.end() ? nullptr : found->second};
  if (part.operation && part.operation->slot >= 0) bit_flights_[part.operation->slot] = nullptr;
  if (changes_cache && part.response->error.empty()) {
    GOSSAMER_CHECK(part.operation, ErrorKind::comm, "negotiate: rank 0 caches '", part.response->request.name,
                   "', which this rank has not submitted");
    cache_.store(part.response, std::make_shared<const Request>(part.operation->request));
  } else if (changes_cache) {
    cache_.drop(part.response->slot);
  }
  return part;
}

void Negotiator::execute(const std::vector<Part>& parts) {
  const Response& first = *parts.front().response;
  std::string error = first.error;
  if (options_.trace) {
    for (const Part& part : parts) trace(Phase::agreed, part.response->request.name, rank_);
  }
  if (error.empty() && moves_data(first.request.kind)) {
    if (options_.trace) {
      for (const Part& part : parts) trace(Phase::executing, part.response->request.name, rank_);
    }
    ++counters_.batches;
    try {
      execute_(parts);
    } catch (const Error& failure) {
      if (failure.kind != ErrorKind::config) throw;
      error = failure.what();
    }
  }
  for (const Part& part : parts) complete(part, error);
}

void Negotiator::complete(const Part& part, const std::string& error) {
  const std::string& name = part.response->request.name;
  if (part.operation) {
    bool wakes = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      in_flight_.erase(name);
      keep_until_waited(*part.operation);
      if (!deferred_.empty()) wakes = release_deferred();
    }
    if (wakes) transport_->wake();
    trace(Phase::done, name, rank_);
    if (part.operation->done) {
      std::exchange(part.operation->done, nullptr)({part.response, ErrorKind::config, error});
    }
    part.operation->payload = nullptr;
  }
}

// Never throws: another error now would follow from one already reported. `tell`: the other ranks do not know it yet.
void Negotiator::end(std::string reason, bool tell) noexcept {
  running_ = false;
  try {
    Received received;  // rank 0's announced reason explains more than its effects here
    while (tell && !coordinator_ && transport_->receive(received, Clock::time_point::min())) {
      const Message message = decode(received.message);
      if (const auto* stop = std::get_if<Stop>(&message)) {
        reason = stop->reason;
        tell = false;
      }
    }
  } catch (...) {
  }
  if (tell && !coordinator_) {
    try {
      send(0, Failure{"negotiate: " + self() + " failed: " + reason});
    } catch (...) {
    }
  }
  for (int member = 1; tell && coordinator_ && member < size_; ++member) {
    try {
      send(member, Stop{reason});
    } catch (...) {
    }
  }
  std::vector<Flight> pending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = std::move(reason);
    for (auto& [name, flight] : std::exchange(in_flight_, {})) pending.push_back(flight);
    for (auto& flights : std::exchange(deferred_, {}))
      pending.insert(pending.end(), flights.begin(), flights.end());
    queue_.clear();
  }
  for (const Flight& flight : pending) {
    try {
      if (flight->done) std::exchange(flight->done, nullptr)({nullptr, ErrorKind::comm, ended_});
    } catch (...) {
    }
    flight->payload = nullptr;
  }
}

}  // namespace gossamer::negotiate
