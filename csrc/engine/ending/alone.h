// The end of a backward that is each rank's own: nothing is sent at it, errors are this rank's alone, and the plan is
// fixed.
#pragma once

#include "engine/ending/ending.h"

namespace gossamer {

class Alone : public Ending {
 public:
  using Ending::Ending;
  void end(bool abandoned) override;
};

}  // namespace gossamer
