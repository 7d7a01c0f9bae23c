// See alone.h.
#include "engine/ending/alone.h"

#include "engine/ending/join.h"

namespace gossamer {

void Alone::gradient_complete(int64_t index) {
  if (listener_.on_gradient) listener_.on_gradient(index);
}

void Alone::end(bool abandoned) {
  Worker& worker = parts_.worker;
  std::vector<int64_t> missing;
  {
    const std::lock_guard<std::mutex> lock(parts_.mutex);
    missing = parts_.hooks.incomplete();
    parts_.flight.fire_rest(*this);
  }
  worker.finish([] {});
  parts_.join.settle();
  worker.set_step(worker.step() + 1);
  const auto failure = parts_.hooks.failure();
  if (!failure) {
    const std::lock_guard<std::mutex> lock(parts_.mutex);
    parts_.hooks.take_stock(!parts_.join.shadowing(), std::nullopt);
  }
  // Also after a failure: other ranks may wait for what this one sends now.
  if (listener_.on_end) listener_.on_end(std::move(missing));
  if (abandoned) return;  // its error has been raised, and training may go on
  if (failure) raise_python(failure->first, worker.place() + ": " + failure->second);
  worker.executor().recorder().end_step();
  if (!parts_.hooks.late()) return;
  raise_python(ErrorKind::config, worker.place(),
               ": a parameter has become trainable since the model was wrapped, which this algorithm "
               "cannot add to its plan; close() the wrapper and wrap the model again");
}

}  // namespace gossamer
