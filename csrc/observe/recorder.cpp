// See recorder.h: one recorder's counters, and its activity. Spans are in span.cpp.
#include "observe/recorder.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace gossamer::observe {
namespace {

std::atomic<bool> counters_are_on{true};
std::atomic<uint32_t> recorders{0};

}  // namespace

void set_counting(bool on) { counters_are_on = on; }
bool counting() { return counters_are_on.load(std::memory_order_relaxed); }

Recorder::Recorder() : number_(++recorders) {}

uint64_t Recorder::enter(std::string_view what, int64_t bucket) {
  if (!counting()) return 0;
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  entered_.push_back({++last_id_, {std::string(what), bucket, now}});
  return last_id_;
}

void Recorder::change(uint64_t id, std::string_view what) {
  if (id == 0) return;
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& entered : entered_) {
    if (entered.id != id) continue;
    entered.activity.what = what;
    entered.activity.since_ns = now;
  }
}

void Recorder::leave(uint64_t id) {
  if (id == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found =
      std::find_if(entered_.begin(), entered_.end(), [&](const Entered& each) { return each.id == id; });
  if (found != entered_.end()) entered_.erase(found);
}

void Recorder::leave_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  entered_.clear();
}

std::vector<Activity> Recorder::activity() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Activity> result;
  for (const auto& entered : entered_) result.push_back(entered.activity);
  return result;
}

void Recorder::begin_operation() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (under_way_++ == 0) first_began_ = now_ns();
}

void Recorder::end_operation(int64_t bucket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--under_way_ > 0) return;
  const int64_t ns = now_ns() - first_began_;
  step_.communication += ns;
  if (bucket < 0) return;
  const auto index = static_cast<size_t>(bucket);
  if (step_.communication_of.size() <= index) step_.communication_of.resize(index + 1);
  step_.communication_of[index] += ns;
}

void Recorder::add_exposed(int64_t ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_.exposed += ns;
  ++step_.waits;
}

void Recorder::end_step() {
  if (!counting()) return;
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(mutex_);
  step_.wall = now - step_began_;
  Step ended = std::exchange(step_, {});
  if (std::exchange(step_began_, now) == 0) return;  // the first step's begin is unknown
  ++totals_.steps;
  totals_.wall += ended.wall;
  totals_.communication += ended.communication;
  totals_.exposed += ended.exposed;
  if (steps_.size() == kKept) steps_.pop_front();
  steps_.push_back(std::move(ended));
}

std::vector<Step> Recorder::steps() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {steps_.begin(), steps_.end()};
}

Recorder::Totals Recorder::totals() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return totals_;
}

void Recorder::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  steps_.clear();
  totals_ = {};
}

}  // namespace gossamer::observe
