// The end of a backward for ranks that are independent: nothing is sent, errors concern this rank alone, and the plan is
// fixed. A listener may follow the gradients, for an algorithm that decides itself when its tensors travel.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "engine/ending/ending.h"

namespace gossamer {

class Alone : public Ending {
 public:
  using Ending::Ending;

  // Called without the mutex and without the GIL, in the thread that runs the backward. `on_gradient`: the gradient of
  // this parameter is complete. `on_end`: the backward has ended, or has raised and was abandoned; the parameters listed
  // got no gradient in it. Null: not called. Between backwards.
  struct Listener {
    std::function<void(int64_t index)> on_gradient;
    std::function<void(std::vector<int64_t> missing)> on_end;
  };
  void set_listener(Listener listener) { listener_ = std::move(listener); }

  void gradient_complete(int64_t index) override;
  void end(bool abandoned) override;

 private:
  Listener listener_;
};

}  // namespace gossamer
