// What the backend's operation files share beside its class: how an operation begins, how errors leave it, and how an
// argument check that fails is told to the other ranks.
#pragma once

#include <ATen/record_function.h>

#include <exception>
#include <string>
#include <utility>

#include "backend/backend.h"
#include "errors.h"

namespace gossamer {

// Any exception of an operation as one that keeps its Python class on its way through torch.
std::exception_ptr python_error(const char* title, std::exception_ptr error);

// A work, its place in the queue and their closures take longer than a small message, so a caller that waits does without.
// Torch takes no work for "is done". A profiler is told by the work, so there is one where a profiler may listen.
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
