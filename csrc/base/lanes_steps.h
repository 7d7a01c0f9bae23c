// Tables for by_steps of vector lanes: distances 0 to 127 in 16 parts of 8, with one step at most inside each part.
// Included by lanes_*.h only.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace gossamer::GOSSAMER_ISA {

template <int... steps>
struct StepTables {
  alignas(16) int8_t before[16] = {};  // the number of steps up to the start of each part
  alignas(16) int8_t below[16] = {};   // one less than the step inside the part; 127 where there is none

  constexpr StepTables() {
    for (int part = 0; part < 16; ++part) {
      const int begin = 8 * part;
      before[part] = static_cast<int8_t>(((steps <= begin ? 1 : 0) + ...));
      const int inside = ((steps > begin && steps < begin + 8 ? steps : 0) + ...);
      below[part] = static_cast<int8_t>(inside > 0 ? inside - 1 : 127);
    }
  }
};

}  // namespace gossamer::GOSSAMER_ISA
