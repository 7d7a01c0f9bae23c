// Which agreed operations run together: those of one kind, dtype, device, reduction and factors, up to a threshold. Decided
// by the coordinator alone, whose decision every rank carries out, so ranks need not be configured alike.
#pragma once

#include "negotiate/request.h"

namespace gossamer::negotiate {

struct Agreed {
  std::shared_ptr<const Response> response;
  bool cached = false;  // every rank has it in response->slot
};

struct Fusing {
  int64_t bytes = int64_t{128} << 20;  // of one batch; 0: nothing is fused but the operations of a group
  bool groups = true;                  // groups may be fused with other operations
};

// Batches in order of their first operations. A group (a unit of several) is never divided, even above the threshold,
// unless its operations cannot run together at all. Broadcast, alltoall and errors stay alone.
std::vector<std::vector<Agreed>> fuse(std::vector<std::vector<Agreed>> units, const Fusing& fusing);

}  // namespace gossamer::negotiate
