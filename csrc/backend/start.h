// What the backend's operation files share: how an operation begins, how its errors leave it, and how the other ranks
// learn that an argument check has failed.
#pragma once

#include <ATen/record_function.h>

#include <exception>
#include <string>
#include <utility>

#include "backend/backend.h"
#include "errors.h"

namespace gossamer {

// Turns any exception of an operation into one that keeps its Python class on its way through torch.
std::exception_ptr python_error(const char* title, std::exception_ptr error);

// Making a work and queueing it takes longer than a small message, so a caller that waits gets no work: torch takes a null
// work as "done". A profiler learns of an operation from its work, so a work is made where a profiler may listen.
template <class Run>
GossamerBackend::Reply GossamerBackend::start(const Plan& plan, const Tensors& inputs, Outputs outputs,
                                              Run body) {
  require_usable();
  if (plan.async || at::hasCallbacks() || !queue_->enter()) {
    return enqueue(plan, inputs, outputs.copy(), std::move(body));
  }
  ++sequence_;
  std::exception_ptr error;
  try {
    body(deadline_of(plan.timeout));
  } catch (...) {
    error = python_error(plan.title, std::current_exception());
  }
  queue_->leave();
  return error ? failed(plan, inputs, outputs.copy(), error) : Reply();
}

template <class Check>
auto GossamerBackend::checked(const Plan& plan, Check&& check) {
  require_usable();
  try {
    return check();
  } catch (...) {
    const auto error = python_error(plan.title, std::current_exception());
    std::string reason;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      reason = known.what();
    }
    Plan later = plan;
    later.async = true;
    start(later, {}, {}, [this, reason](shm::Deadline deadline) {
      hosts_ ? hosts_->refuse(reason, deadline) : group_->refuse(reason, deadline);
    });
    std::rethrow_exception(error);
  }
}

}  // namespace gossamer
