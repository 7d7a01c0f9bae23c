// A profiler watches one thread; the worker does that thread's work. So torch's thread-local state of the profiler travels
// with a task. It is not torch's whole at::ThreadLocalState: its grad mode and dispatch keys would change what tasks do.
// Used by executor.cpp; declared in executor.h.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace gossamer {

struct ProfiledThread {
  std::shared_ptr<c10::ThreadLocalDebugInfo> info;
  at::RecordFunctionTLS callbacks;
};

// The calling thread's state; null if no profiler watches it.
std::shared_ptr<const ProfiledThread> profiled_thread();

class ProfiledGuard {
 public:
  explicit ProfiledGuard(const ProfiledThread& thread);
  ~ProfiledGuard();
  ProfiledGuard(const ProfiledGuard&) = delete;
  ProfiledGuard& operator=(const ProfiledGuard&) = delete;

 private:
  at::RecordFunctionTLS before_;
  c10::DebugInfoGuard info_;
};

}  // namespace gossamer
