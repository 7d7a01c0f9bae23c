// Rounds: the moments of a step where nobody tells when a forward begins, as in the Horovod face. Backwards bring
// gradients, and the caller ends the round, which is the same number of times on every rank. The rest of Engine is in
// engine.cpp.
#include <algorithm>

#include "engine/engine.h"

namespace gossamer {

void Engine::use_rounds(int64_t passes) {
  check_alive();
  const std::lock_guard<std::mutex> lock(mutex_);
  passes_ = passes;
  for (auto& slot : slots_) {
    if (!slot.ready) slot.expected = slot.arrivals + passes;
  }
}

// What a forward does elsewhere: nobody else looks at the parameters before their gradients are sent.
void Engine::begin_round_locked() {
  try {
    survey_locked();
  } catch (const PythonError& error) {
    remember_failure(error.kind, error.what());
  }
}

void Engine::end_round() {
  check_alive();
  begin_backward();  // where no gradient has come
  finish(/*abandoned=*/false);
}

bool Engine::round_is_under_way() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.ready; });
}

}  // namespace gossamer
