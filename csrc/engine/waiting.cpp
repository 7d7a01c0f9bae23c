// How an engine waits for its worker, and the errors that come out of that: with their place, and with what the stall watch
// (python/gossamer/observe/stall.py, on a thread of its own) has found out about a wait that lasts long. See engine.h.
#include <sstream>

#include "engine/engine.h"

namespace gossamer {

void Engine::wait() {
  check_alive();
  try {
    executor_->wait([this] { look_around(); });
  } catch (const std::exception&) {
    fail_wait();
  }
}

void Engine::run_guarded(const std::string& what, const std::function<void()>& task) {
  try {
    task();
  } catch (...) {
    announce_failure();
    rethrow_with_context(place() + " " + what + ": ");
  }
}

void Engine::rethrow_with_context(const std::string& context) {
  try {
    throw;
  } catch (const PythonError& error) {
    throw PythonError(error.kind, context + error.what());
  } catch (const Error& error) {
    throw PythonError(error.kind, context + error.what());
  } catch (const torch::PyTorchError&) {
    throw;
  } catch (const python_error&) {
    throw;
  } catch (const std::exception& error) {
    throw PythonError(ErrorKind::comm, context + error.what());
  }
}

void Engine::tell_stall(const std::string& facts, bool stop) {
  {
    const std::lock_guard<std::mutex> lock(stall_mutex_);
    if (stopped_) return;  // what ended it is what is said of it
    stall_ = facts;
    stopped_ = stop;
  }
  if (stop) announce_failure();
}

std::string Engine::stall_facts() const {
  const std::lock_guard<std::mutex> lock(stall_mutex_);
  return stall_;
}

void Engine::look_around() const {
  raise_interrupt();
  if (stopped_) throw PythonError(ErrorKind::comm, "the stall watch ended the wait");
}

void Engine::fail_wait() {
  try {
    const std::string facts = stall_facts();
    if (facts.empty()) throw;
    rethrow_with_context(facts + ": ");
  } catch (const std::exception& error) {
    broken_ = error.what();
    announce_failure();  // so that the worker's operation and the other ranks' end soon as well
    throw;
  }
}

}  // namespace gossamer
