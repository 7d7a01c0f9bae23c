// See trace.h. The lock is held while one event is copied, and only while a trace is on.
#include "observe/trace.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

namespace gossamer::observe {
namespace {

struct Ring {
  std::mutex mutex;
  std::vector<TraceEvent> events;
  size_t capacity = 0;
  uint64_t added = 0;
};

// Never destroyed: a worker may outlive the statics of this library.
Ring& ring() {
  static auto* const made = new Ring;
  return *made;
}

}  // namespace

std::atomic<bool> trace_is_on{false};

int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

void TraceEvent::set_name(std::string_view text) {
  const size_t length = std::min(text.size(), name.size() - 1);
  std::copy_n(text.data(), length, name.data());
  name[length] = '\0';
}

void start_trace(size_t capacity) {
  const std::lock_guard<std::mutex> lock(ring().mutex);
  ring().events.clear();
  ring().events.reserve(capacity);
  ring().capacity = capacity;
  ring().added = 0;
  trace_is_on = true;
}

void add_event(const TraceEvent& event) {
  const std::lock_guard<std::mutex> lock(ring().mutex);
  if (!tracing() || ring().capacity == 0) return;
  if (ring().events.size() < ring().capacity) {
    ring().events.push_back(event);
  } else {
    ring().events[ring().added % ring().capacity] = event;
  }
  ++ring().added;
}

Taken stop_trace() {
  const std::lock_guard<std::mutex> lock(ring().mutex);
  trace_is_on = false;
  Taken taken;
  taken.events = std::exchange(ring().events, {});
  taken.replaced = ring().added - taken.events.size();
  if (taken.replaced > 0) {
    const auto oldest = static_cast<std::ptrdiff_t>(ring().added % ring().capacity);
    std::rotate(taken.events.begin(), taken.events.begin() + oldest, taken.events.end());
  }
  ring().added = 0;
  return taken;
}

}  // namespace gossamer::observe
