// The spans of this process while a timeline is recorded: a ring of fixed size to which any thread adds, and the clock of
// all spans. Not a file format: Python takes the events and writes them. Torch-free; fed by recorder.h.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace gossamer::observe {

int64_t now_ns();  // a steady clock of this host, with an arbitrary origin

struct TraceEvent {
  std::array<char, 48> name{};  // cut, and ended by a zero
  const char* category = "";    // a literal
  uint32_t thread = 0;          // 0: the caller's; else the number of the worker's recorder
  bool instant = false;
  int64_t bucket = -1, step = -1;  // -1: of none
  int64_t bytes = 0;
  int64_t begin_ns = 0, end_ns = 0;

  void set_name(std::string_view text);
};

// Whether events are recorded now. Asked before anything is measured only for a trace.
extern std::atomic<bool> trace_is_on;
inline bool tracing() { return trace_is_on.load(std::memory_order_relaxed); }

// Begins an empty trace. Once `capacity` events are there, each new one replaces the oldest.
void start_trace(size_t capacity);
void add_event(const TraceEvent& event);  // dropped where no trace is on

struct Taken {
  std::vector<TraceEvent> events;  // in the order in which they ended
  uint64_t replaced = 0;           // oldest ones that are missing
};
Taken stop_trace();

}  // namespace gossamer::observe
