// What the backend's operation files share beside its class: how errors leave an operation, and how an argument check
// that fails is told to the other ranks.
#pragma once

#include <exception>
#include <string>

#include "backend/backend.h"
#include "errors.h"

namespace gossamer {

// Any exception of an operation as one that keeps its Python class on its way through torch.
std::exception_ptr python_error(const char* title, std::exception_ptr error);

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
