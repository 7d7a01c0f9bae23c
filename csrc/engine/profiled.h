// A profiler that looks at one thread, and the worker that does that thread's work: what torch keeps of it in thread-local
// memory goes along with a task. Not torch's whole at::ThreadLocalState, whose grad mode and dispatch keys would change
// what tasks do. Used by executor.cpp; named in executor.h.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace gossamer {

struct ProfiledThread {
  std::shared_ptr<c10::ThreadLocalDebugInfo> info;
  at::RecordFunctionTLS callbacks;
};

// Of the calling thread; null where no profiler looks at it.
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
