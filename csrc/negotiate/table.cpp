// See table.h.
#include "negotiate/table.h"

#include <algorithm>
#include <utility>

namespace gossamer::negotiate {
namespace {

const Request& first_of(const Requests& requests) {
  return **std::find_if(requests.begin(), requests.end(), [](const auto& request) { return request; });
}

}  // namespace

Table::Table(std::vector<int> ranks)
    : ranks_(std::move(ranks)), joined_(ranks_.size()), joins_(ranks_.size()) {}

void Table::add(int rank, std::shared_ptr<const Request> request, int32_t slot, Clock::time_point now) {
  if (request->kind == Collective::join) return join(rank, std::move(request));
  const auto [found, added] = waiting_.try_emplace(request->name);
  Waiting& waiting = found->second;
  if (added) {
    waiting.requests.resize(ranks_.size());
    waiting.since = now;
  }
  GOSSAMER_CHECK(!waiting.requests[rank], ErrorKind::comm, "negotiate: rank ", ranks_[rank], " submitted '",
                 request->name, "' twice; do all ranks run the same version?");
  if (request->group_size > 0) {
    OperationGroup& group = groups_[request->group];
    group.names.insert(request->name);
    group.ranks.insert(rank);
    group.size = std::max(group.size, request->group_size);
    touched_.insert(request->group);
  }
  waiting.requests[rank] = std::move(request);
  ++waiting.present;
  if (slot >= 0) {
    ++waiting.bits;
    waiting.slot = slot;
  }
  look(found->first, waiting);
}

void Table::join(int rank, std::shared_ptr<const Request> request) {
  GOSSAMER_CHECK(!joined_[rank], ErrorKind::comm, "negotiate: rank ", ranks_[rank], " joined twice");
  joined_[rank] = true;
  ++joined_count_;
  last_joined_ = rank;
  joins_[rank] = std::move(request);
  for (auto& [name, waiting] : waiting_) look(name, waiting);
}

void Table::look(const std::string& name, Waiting& waiting) {
  if (waiting.ready) return;
  waiting.ready =
      joined_count_ == 0 ? waiting.present == static_cast<int>(ranks_.size()) : complete(waiting.requests);
  if (waiting.ready) ready_.push_back(name);
}

bool Table::complete(const Requests& requests) const {
  for (size_t rank = 0; rank < requests.size(); ++rank) {
    if (!requests[rank] && !joined_[rank]) return false;
  }
  return true;
}

Matched Table::remove(const std::string& name) {
  auto node = waiting_.extract(name);
  Waiting& waiting = node.mapped();
  for (const auto& request : waiting.requests) {
    if (!request || request->group_size == 0) continue;
    const auto group = groups_.find(request->group);
    if (group == groups_.end()) continue;
    group->second.names.erase(name);
    if (group->second.names.empty()) groups_.erase(group);
  }
  const Collective kind = first_of(waiting.requests).kind;
  const bool whole = waiting.present == static_cast<int>(ranks_.size()) || kind == Collective::allreduce;
  Matched matched;
  if (whole && waiting.bits == waiting.present) matched.slot = waiting.slot;
  matched.requests = std::move(waiting.requests);
  return matched;
}

void Table::take_one(const std::string& name, std::vector<Unit>& units) {
  const auto found = waiting_.find(name);
  if (found == waiting_.end()) return;
  const Request& first = first_of(found->second.requests);
  if (first.group_size == 0 || !same_group(found->second.requests)) {
    const int64_t passed = first.kind == Collective::barrier ? first.era : -1;
    units.push_back({remove(name)});
    return expire(passed, units);
  }
  OperationGroup& group = groups_[first.group];
  group.complete.push_back(name);
  if (static_cast<int32_t>(group.complete.size()) < first.group_size) return;
  const std::vector<std::string> names = std::move(group.complete);
  const std::string group_name = first.group;
  Unit unit;
  std::string bad, error;
  for (const std::string& member : names) {
    unit.push_back(remove(member));
    if (unit.back().slot >= 0) continue;
    const std::string wrong = agree(unit.back().requests, ranks_).error;
    if (!wrong.empty() && error.empty()) {
      bad = member;
      error = wrong;
    }
    unit.back().error = wrong;
  }
  for (Matched& matched : unit) {
    if (error.empty() || !matched.error.empty()) continue;
    matched.error =
        "negotiate: group '" + group_name + "' fails as a whole because of its '" + bad + "': " + error;
  }
  units.push_back(std::move(unit));
}

std::vector<Unit> Table::take() {
  std::vector<Unit> units;
  const std::vector<std::string> ready = std::move(ready_);
  ready_.clear();
  for (const std::string& name : ready) take_one(name, units);
  fail_unlike_groups(units);
  if (joined_count_ == static_cast<int>(ranks_.size()) && joined_count_ > 0) {
    int64_t era = INT64_MAX;
    for (const auto& request : joins_) era = std::min(era, request->era);
    units.push_back({Matched{std::exchange(joins_, Requests(ranks_.size())), -1, last_joined_, {}}});
    joined_.assign(ranks_.size(), false);
    joined_count_ = 0;
    expire(era, units);
  }
  return units;
}

// Fails groups that every rank has submitted, but with different names: a name that some ranks lack would never complete.
void Table::fail_unlike_groups(std::vector<Unit>& units) {
  for (const std::string& name : std::exchange(touched_, {})) {
    const auto found = groups_.find(name);
    if (found == groups_.end()) continue;
    const OperationGroup& group = found->second;
    if (group.ranks.size() < ranks_.size() || static_cast<int32_t>(group.names.size()) <= group.size)
      continue;
    std::string error;
    for (const std::string& member : group.names) {
      const Requests& requests = waiting_.at(member).requests;
      const auto missing = ranks_of(requests, false);
      if (missing.empty() || !error.empty()) continue;
      const Request& first = first_of(requests);
      error = "negotiate: group '" + name + "' must have the same operations on all ranks, got '" + member +
              "' on " + name_ranks(ranks_of(requests, true)) +
              (first.call_site.empty() ? "" : " (" + first.call_site + ")") + " and not on " +
              name_ranks(missing) + "; make them equal";
    }
    Unit unit;
    const std::set<std::string> names = group.names;
    for (const std::string& member : names) {
      unit.push_back(remove(member));
      unit.back().slot = -1;
      unit.back().error = error;
    }
    units.push_back(std::move(unit));
  }
}

// All ranks have passed the barrier or join that ended `era`: fails the unnamed operations of that era that still wait.
void Table::expire(int64_t era, std::vector<Unit>& units) {
  if (era < 0) return;
  std::vector<std::string> names;
  for (const auto& [name, waiting] : waiting_) {
    const Request& first = first_of(waiting.requests);
    if (moves_data(first.kind) && first.era >= 0 && first.era <= era && !waiting.ready) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    Matched matched = remove(name);
    matched.error = "negotiate: the unnamed '" + name + "' was submitted by " +
                    name_ranks(ranks_of(matched.requests, true)) + " (" +
                    first_of(matched.requests).call_site + ") and not by " +
                    name_ranks(ranks_of(matched.requests, false)) +
                    " before a barrier or join that all have passed; call it on every rank, or name it";
    units.push_back({std::move(matched)});
  }
}

std::vector<int> Table::ranks_of(const Requests& requests, bool submitted) const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < requests.size(); ++rank) {
    if (requests[rank] ? submitted : !submitted && !joined_[rank]) ranks.push_back(ranks_[rank]);
  }
  return ranks;
}

std::vector<Stalled> Table::older_than(double seconds, Clock::time_point now) const {
  std::vector<Stalled> stalled;
  for (const auto& [name, waiting] : waiting_) {
    const double age = std::chrono::duration<double>(now - waiting.since).count();
    if (age < seconds) continue;
    const Request& first = first_of(waiting.requests);
    stalled.push_back({name, first.kind, age, ranks_of(waiting.requests, true),
                       ranks_of(waiting.requests, false), first.call_site});
  }
  std::sort(stalled.begin(), stalled.end(),
            [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return stalled;
}

}  // namespace gossamer::negotiate
