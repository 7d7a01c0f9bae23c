// The end of a backward for ranks that are independent: nothing is sent, errors concern this rank alone, and the plan is
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
