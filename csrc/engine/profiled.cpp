// See profiled.h. Also turns spans of observe/ into torch's, which both of torch's profilers show: "gossamer::encode".
#include "engine/profiled.h"

#include <string>

#include "observe/recorder.h"

namespace gossamer {
namespace {

void* begin(const char* name) {
  auto* function = new at::RecordFunction(at::RecordScope::USER_SCOPE);
  if (function->isActive()) function->before(std::string("gossamer::") + name);
  return function;
}

void end(void* function) { delete static_cast<at::RecordFunction*>(function); }

[[maybe_unused]] const bool hooked = (observe::set_profiler({begin, end}), true);

}  // namespace

std::shared_ptr<const ProfiledThread> profiled_thread() {
  if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) == nullptr) return nullptr;
  return std::make_shared<const ProfiledThread>(
      ProfiledThread{c10::ThreadLocalDebugInfo::current(), at::get_record_function_tls_()});
}

ProfiledGuard::ProfiledGuard(const ProfiledThread& thread)
    : before_(at::get_record_function_tls_()), info_(thread.info) {
  at::set_record_function_tls_(thread.callbacks);
}

ProfiledGuard::~ProfiledGuard() { at::set_record_function_tls_(before_); }

}  // namespace gossamer
