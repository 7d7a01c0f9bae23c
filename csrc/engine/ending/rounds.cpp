// See rounds.h.
#include "engine/ending/rounds.h"

#include <string>

namespace gossamer {

void Rounds::set_passes(int64_t passes) {
  parts_.worker.check_alive();
  const std::lock_guard<std::mutex> lock(parts_.mutex);
  passes_ = passes;
  parts_.hooks.expect(passes);
}

bool Rounds::under_way() const {
  const std::lock_guard<std::mutex> lock(parts_.mutex);
  return parts_.hooks.any_complete();
}

void Rounds::surplus(int64_t index) {
  raise_assertion(parts_.worker.place() + ": parameter '" + parts_.hooks.name(index) +
                  "' got its gradient more often than backward_passes_per_step (" + std::to_string(passes_) +
                  ") allows before step(); call step() or synchronize() first, give a larger "
                  "backward_passes_per_step, or drop this optimizer if something else trains the model now");
}

}  // namespace gossamer
