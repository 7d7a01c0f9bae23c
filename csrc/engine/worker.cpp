// See worker.h.
#include "engine/worker.h"

#include <sstream>
#include <utility>

#include "backend/gil.h"
#include "errors.h"

namespace gossamer {

Worker::Worker(CommunicatorPtr comm, CommunicatorPtr control)
    : comm_(std::move(comm)), control_(std::move(control)), executor_(comm_->device()) {}

void Worker::submit(std::function<void()> task, const std::string& what) {
  check_alive();
  keep_order(executor_.submit_behind_current(
      [this, task = std::move(task), what] { run_guarded(what, task); }, what));
}

void Worker::keep_order(uint64_t last) {
  if (!comm_->queues_on_device()) return;
  try {
    executor_.wait_until_run([this] { look_around(); }, last);
  } catch (const std::exception&) {
    fail_wait();
  }
}

void Worker::wait() {
  check_alive();
  finish([] {});
}

void Worker::finish(const std::function<void()>& last) {
  try {
    executor_.wait([this] { look_around(); });
    last();
  } catch (const std::exception&) {
    fail_wait();
  }
}

void Worker::run_guarded(const std::string& what, const std::function<void()>& task) {
  try {
    task();
  } catch (...) {
    announce_failure();
    rethrow_with_context(place() + " " + what + ": ");
  }
}

void Worker::rethrow_with_context(const std::string& context) {
  try {
    throw;
  } catch (const RaisedError& error) {
    raise_python(error.kind, context, error.message);
  } catch (const Error& error) {
    raise_python(error.kind, context, error.what());
  } catch (const std::exception& error) {
    if (has_python_class(error)) throw;
    raise_python(ErrorKind::comm, context, error.what());
  }
}

void Worker::fail_wait() {
  try {
    const std::string facts = stall_facts();
    if (facts.empty()) throw;
    rethrow_with_context(facts + ": ");
  } catch (const std::exception& error) {
    broken_ = error.what();
    announce_failure();  // so that the operations of the worker and of the other ranks end soon
    throw;
  }
}

void Worker::look_around() const {
  raise_interrupt();
  if (stopped_) raise_python(ErrorKind::comm, "the stall watch ended the wait");
}

std::string Worker::place() const {
  std::ostringstream text;
  text << "rank " << comm_->rank() << "/" << comm_->size() << " step " << step_.load();
  return text.str();
}

void Worker::check_alive() const {
  if (closed_) raise_python(ErrorKind::config, why_closed_);
  if (broken_) raise_python(ErrorKind::comm, "this engine stopped: " + *broken_);
  if (stopped_) raise_python(ErrorKind::comm, "this engine stopped: " + stall_facts());
}

void Worker::give_up(const std::string& why, bool announce) {
  if (closed_ || broken_) return;
  broken_ = place() + ": " + why;
  if (announce) announce_failure();
}

void Worker::mark_closed(std::string why) {
  why_closed_ = why.empty() ? "this engine is closed; wrap the model again" : std::move(why);
  closed_ = true;
}

void Worker::stop(bool unfinished, const std::string& what) {
  // Otherwise the worker's operation, and the ranks that wait for this one, would wait for the whole timeout.
  if (unfinished) tell_own(what);
  executor_.stop();
}

void Worker::announce_failure() noexcept {
  tell_own(Communicator::kFailed);
  for (const auto& comm : others_) comm->announce_failure();
}

void Worker::tell_own(const std::string& what) noexcept {
  comm_->announce_failure(what);
  if (control_ != comm_) control_->announce_failure(what);
}

void Worker::tell_stall(const std::string& facts, bool stop) {
  {
    const std::lock_guard<std::mutex> lock(stall_mutex_);
    if (stopped_) return;  // the facts that ended the wait stay
    stall_ = facts;
    stopped_ = stop;
  }
  if (stop) tell_own("stopped: its stall watch ended the wait");
}

std::string Worker::stall_facts() const {
  const std::lock_guard<std::mutex> lock(stall_mutex_);
  return stall_;
}

}  // namespace gossamer
