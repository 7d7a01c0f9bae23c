// See coordinator.h.
#include "negotiate/coordinator.h"

namespace gossamer::negotiate {
namespace {

Batch describe(const std::vector<Agreed>& agreed) {
  Batch batch;
  for (const Agreed& one : agreed) {
    if (!one.cached) {
      batch.push_back({-1, 0, {*one.response}});
    } else if (!batch.empty() && batch.back().first_slot + batch.back().slots == one.response->slot &&
               batch.back().slots > 0) {
      ++batch.back().slots;
    } else {
      batch.push_back({one.response->slot, 1, {}});
    }
  }
  return batch;
}

}  // namespace

Coordinator::Coordinator(std::vector<int> ranks, const Fusing& fusing, int cache_capacity)
    : ranks_(std::move(ranks)),
      fusing_(fusing),
      capacity_(cache_capacity),
      table_(ranks_),
      slots_(cache_capacity) {}

void Coordinator::take(int rank, Submission submission, Clock::time_point now) {
  for (size_t word = 0; word < submission.bits.size(); ++word) {
    for (uint64_t bits = submission.bits[word]; bits != 0; bits &= bits - 1) {
      const auto slot = static_cast<int32_t>(word * 64 + static_cast<size_t>(__builtin_ctzll(bits)));
      if (!slots_.current(slot, submission.seen)) continue;  // its sender submits it in full
      slots_.wait(slot);
      table_.add(rank, slots_.request(slot, rank), slot, now);
    }
  }
  for (Request& request : submission.requests) {
    table_.add(rank, std::make_shared<const Request>(std::move(request)), -1, now);
  }
}

Agreed Coordinator::settle(Matched matched) {
  if (matched.slot >= 0) {
    slots_.use(matched.slot, sequence_);
    return {slots_.response(matched.slot), true};
  }
  bool everyone = true;
  for (const auto& request : matched.requests) everyone = everyone && request != nullptr;
  auto response = std::make_shared<Response>();
  if (matched.error.empty()) {
    *response = agree(matched.requests, ranks_);
  } else {
    for (size_t rank = matched.requests.size(); rank-- > 0;) {
      if (matched.requests[rank]) response->request = *matched.requests[rank];
    }
    response->error = std::move(matched.error);
  }
  const Request& request = response->request;
  if (!response->error.empty()) {
    response->slot = slots_.drop(request.name, sequence_);
  } else if (request.kind == Collective::join) {
    response->value = matched.value;
  } else if (request.kind == Collective::add_process_set) {
    response->value = next_process_set_++;
  } else if (moves_data(request.kind) && request.era < 0 && everyone && capacity_ > 0) {
    slots_.store(response, std::move(matched.requests), sequence_);
  } else {  // a joined rank has no request of its own to compare its next one with
    slots_.release(request.name);
  }
  return {response, false};
}

std::optional<Decision> Coordinator::decide() {
  std::vector<Unit> units = table_.take();
  if (units.empty()) return std::nullopt;
  ++sequence_;
  // The cached ones first: the slots that they use must not be given up for new ones.
  for (const Unit& unit : units) {
    for (const Matched& matched : unit) {
      if (matched.slot >= 0 && matched.error.empty()) slots_.use(matched.slot, sequence_);
    }
  }
  std::vector<std::vector<Agreed>> agreed;
  for (Unit& unit : units) {
    agreed.emplace_back();
    for (Matched& matched : unit) {
      if (!matched.error.empty()) matched.slot = -1;
      agreed.back().push_back(settle(std::move(matched)));
    }
  }
  Decision decision{sequence_, {}};
  for (const auto& batch : fuse(std::move(agreed), fusing_)) decision.batches.push_back(describe(batch));
  return decision;
}

}  // namespace gossamer::negotiate
