// Which agreed operations run together: those of one kind, dtype, device, reduction and factors, up to a threshold. The
// coordinator alone decides, and every rank carries the decision out, so ranks may be configured differently.
#pragma once

#include "negotiate/request.h"

namespace gossamer::negotiate {

struct Agreed {
  std::shared_ptr<const Response> response;
  bool cached = false;  // every rank has it in response->slot
};

struct Fusing {
  int64_t bytes = int64_t{128} << 20;  // of one batch; 0: only the operations of a group are fused
  bool groups = true;                  // groups may be fused with other operations
};

// Returns batches in the order of their first operations. A group (a unit of several) is never divided, even above the
// threshold, unless its operations cannot run together. Broadcast, alltoall and errors stay alone.
std::vector<std::vector<Agreed>> fuse(std::vector<std::vector<Agreed>> units, const Fusing& fusing);

}  // namespace gossamer::negotiate
