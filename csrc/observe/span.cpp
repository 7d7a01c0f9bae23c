// The spans of recorder.h: what a thread does, for a trace and for a profiler. Operations with other ranks, and waits, feed
// the counters too.
#include "observe/recorder.h"

#include <utility>

namespace gossamer::observe {
namespace {

Profiler profiler;

void* begin_profiled(const char* name) {
  return context().profiled && profiler.begin != nullptr ? profiler.begin(name) : nullptr;
}

void end_profiled(void* token) {
  if (token != nullptr) profiler.end(token);
}

}  // namespace

Context& context() {
  static thread_local Context current;
  return current;
}

void set_profiler(Profiler given) { profiler = given; }

Scope::Scope(Recorder& recorder, uint32_t thread, bool profiled) : before_(context()) {
  Context& here = context();
  here.recorder = &recorder;
  here.thread = thread;
  here.profiled = profiled;
  ++here.ticks;
}

Scope::~Scope() {
  const uint64_t ticks = context().ticks;
  context() = before_;
  context().ticks = ticks + 1;
}

Span::Span(const char* name, const char* category, int64_t bytes)
    : name_(name), category_(category), bytes_(bytes) {
  Context& here = context();
  if (here.recorder == nullptr || !(tracing() || here.profiled)) return;
  ++here.ticks;
  begin_ = now_ns();
  token_ = begin_profiled(name_);
}

Span::~Span() {
  if (begin_ == 0) return;
  end_profiled(token_);
  Context& here = context();
  ++here.ticks;
  if (!tracing()) return;
  TraceEvent event;
  event.set_name(name_);
  event.category = category_;
  event.thread = here.thread;
  event.bucket = here.bucket;
  event.step = here.step;
  event.bytes = bytes_;
  event.begin_ns = begin_;
  event.end_ns = now_ns();
  add_event(event);
}

void instant(std::string_view name, int64_t bucket, int64_t step, int64_t bytes) {
  if (!tracing()) return;
  TraceEvent event;
  event.set_name(name);
  event.category = "moment";
  event.instant = true;
  event.bucket = bucket;
  event.step = step;
  event.bytes = bytes;
  event.begin_ns = event.end_ns = now_ns();
  add_event(event);
}

Flight::Flight(const char* operation, int64_t bytes) : operation_(operation), bytes_(bytes) {
  Context& here = context();
  if (here.recorder == nullptr || !(counting() || tracing() || here.profiled)) return;
  recorder_ = here.recorder->shared_from_this();
  bucket_ = here.bucket;
  step_ = here.step;
  id_ = recorder_->enter(operation_, bucket_);
  ++here.ticks;
  open();
  begin_ = now_ns();
  token_ = begin_profiled(operation_);
}

Flight::Flight(Flight&& other) noexcept
    : recorder_(std::move(other.recorder_)),
      operation_(other.operation_),
      bytes_(other.bytes_),
      bucket_(other.bucket_),
      step_(other.step_),
      id_(std::exchange(other.id_, 0)),
      tick_(other.tick_),
      begin_(other.begin_),
      posted_(other.posted_),
      resumed_(other.resumed_),
      open_(std::exchange(other.open_, false)),
      token_(std::exchange(other.token_, nullptr)) {}

Flight::~Flight() {
  end_profiled(token_);  // still open only after a failure
  if (!recorder_) return;
  close();
  recorder_->leave(id_);
}

void Flight::open() {
  if (counting() && !std::exchange(open_, true)) recorder_->begin_operation();
}

void Flight::close() {
  if (std::exchange(open_, false)) recorder_->end_operation(bucket_);
}

void Flight::posted() {
  if (!recorder_) return;
  end_profiled(std::exchange(token_, nullptr));
  posted_ = now_ns();
  tick_ = ++context().ticks;
  if (bucket_ < 0) close();
}

void Flight::waiting() {
  if (!recorder_) return;
  open();
  resumed_ = now_ns();
  token_ = begin_profiled(operation_);
}

void Flight::done() {
  if (!recorder_) return;
  end_profiled(std::exchange(token_, nullptr));
  const int64_t end = now_ns();
  const bool alone = context().ticks == tick_;
  ++context().ticks;
  close();
  recorder_->leave(std::exchange(id_, 0));
  if (tracing()) {
    if (!alone) add(begin_, posted_);
    add(alone ? begin_ : resumed_, end);
  }
  recorder_.reset();
}

void Flight::add(int64_t begin, int64_t end) {
  TraceEvent event;
  event.set_name(operation_);
  event.category = "communication";
  event.thread = context().thread;
  event.bucket = bucket_;
  event.step = step_;
  event.bytes = bytes_;
  event.begin_ns = begin;
  event.end_ns = end;
  add_event(event);
}

Waiting::Waiting(Recorder& recorder, const char* what, bool profiled)
    : recorder_(recorder),
      scope_(recorder, /*thread=*/0, profiled),
      id_(recorder.enter(what, -1)),
      begin_(now_ns()),
      span_(what, "wait") {}

Waiting::~Waiting() {
  if (counting()) recorder_.add_exposed(now_ns() - begin_);
  recorder_.leave(id_);
}

}  // namespace gossamer::observe
