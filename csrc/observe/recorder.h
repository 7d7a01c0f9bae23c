// What one worker thread, and the threads that wait for it, do and how long it takes: counters that are always on, what is
// queued or runs now, and spans while a trace or a profiler is on. It only measures: no result and no order depends on it.
// Torch-free. engine/executor.h owns one; collectives/ and comm/ find it through the thread that they run on.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "observe/trace.h"

namespace gossamer::observe {

// Turns counting off, to measure what the counters cost.
void set_counting(bool on);
bool counting();

struct Step {                 // in nanoseconds
  int64_t wall = 0;           // from the end of the previous synchronised backward to the end of this one
  int64_t communication = 0;  // some operation with other ranks was under way
  int64_t exposed = 0;        // callers waited for the worker
  int64_t waits = 0;          // how often callers waited
  std::vector<int64_t> communication_of;  // by bucket
};

struct Activity {
  std::string what;
  int64_t bucket = -1;
  int64_t since_ns = 0;
};

class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  static constexpr size_t kKept = 100;  // steps

  Recorder();
  uint32_t number() const { return number_; }  // from 1, of this process

  // Something begins to wait or to run, until leave(). Returns its id, or 0 if counting is off; leave() ignores 0.
  uint64_t enter(std::string_view what, int64_t bucket);
  void change(uint64_t id, std::string_view what);  // its text from now on
  void leave(uint64_t id);
  void leave_all();
  std::vector<Activity> activity() const;

  // Communication is the time in which at least one operation is under way. It is counted when the last of these operations
  // ends, for the bucket of that one.
  void begin_operation();
  void end_operation(int64_t bucket);
  void add_exposed(int64_t ns);
  void end_step();

  // The last kKept steps that ended since the last clear(), and how many ended in all.
  std::vector<Step> steps() const;
  struct Totals {
    int64_t steps = 0, wall = 0, communication = 0, exposed = 0;
  };
  Totals totals() const;
  void clear();

 private:
  struct Entered {
    uint64_t id;
    Activity activity;
  };
  const uint32_t number_;
  mutable std::mutex mutex_;  // held for a few instructions
  uint64_t last_id_ = 0;
  std::vector<Entered> entered_;
  Step step_;
  int64_t step_began_ = 0;  // 0: not known
  int64_t under_way_ = 0;   // operations
  int64_t first_began_ = 0;
  std::deque<Step> steps_;
  Totals totals_;
};

// Where the spans of this thread belong. A Scope sets it; outside of a Scope nothing is recorded.
struct Context {
  Recorder* recorder = nullptr;
  uint32_t thread = 0;
  int64_t bucket = -1, step = -1;
  bool profiled = false;  // a profiler watches this thread
  uint64_t ticks = 0;     // spans that have begun or ended
};
Context& context();

class Scope {
 public:
  Scope(Recorder& recorder, uint32_t thread, bool profiled);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Context before_;
};

// A profiler that knows nothing of this library. begin() returns the token that end() takes.
struct Profiler {
  void* (*begin)(const char* name) = nullptr;
  void (*end)(void* token) = nullptr;
};
void set_profiler(Profiler profiler);

// A span from its construction to the end of the block. `name` must outlive it; `category` is a literal.
class Span {
 public:
  Span(const char* name, const char* category, int64_t bytes = 0);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const char* name_;
  const char* category_;
  int64_t bytes_;
  int64_t begin_ = 0;  // 0: nobody wants to know
  void* token_ = nullptr;
};

// An event without duration, for a trace only.
void instant(std::string_view name, int64_t bucket, int64_t step, int64_t bytes = 0);

// One operation with other ranks: posted between construction and posted(), and possibly waited for later. In a trace the
// two are one span if nothing came between them. An operation of a bucket is under way from the construction to the end of
// the wait. Any other, such as the agreement, which flies beside buckets, is under way only while its thread is in it.
class Flight {
 public:
  Flight(const char* operation, int64_t bytes);  // a literal
  ~Flight();
  Flight(Flight&& other) noexcept;
  Flight& operator=(Flight&&) = delete;
  void posted();
  void waiting();
  void done();

 private:
  void open();
  void close();
  void add(int64_t begin, int64_t end);
  std::shared_ptr<Recorder> recorder_;  // null: nothing is recorded
  const char* operation_;
  int64_t bytes_;
  int64_t bucket_ = -1, step_ = -1;
  uint64_t id_ = 0;
  uint64_t tick_ = 0;
  int64_t begin_ = 0, posted_ = 0, resumed_ = 0;
  bool open_ = false;  // under way
  void* token_ = nullptr;
};

// A caller that waits for the worker: counted as exposed, and recorded as a span.
class Waiting {
 public:
  Waiting(Recorder& recorder, const char* what, bool profiled);
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Recorder& recorder_;
  Scope scope_;
  uint64_t id_;
  int64_t begin_;
  Span span_;
};

}  // namespace gossamer::observe
