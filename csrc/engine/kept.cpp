// Copies of gradients as they were before they were sent, for whoever asks what the codec does to them: see engine.h. Off
// unless asked for; the rest of Engine is in engine.cpp.
#include "engine/engine.h"

namespace gossamer {

void Engine::keep_gradients(bool keep) {
  const std::lock_guard<std::mutex> lock(mutex_);
  keeps_gradients_ = keep;
  if (!keep) kept_.clear();
}

std::map<int64_t, at::Tensor> Engine::kept_gradients() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kept_;
}

void Engine::keep(const Bucket& bucket) {
  if (!bucket.has("grad")) return;
  const at::Tensor copy = bucket.flat("grad").clone();
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_[bucket.index()] = copy;
}

}  // namespace gossamer
