// torch's symmetric memory for CPU tensors: torch.distributed._symmetric_memory.empty(..., device="cpu") and
// rendezvous() over a process group of the backend "gossamer".
#pragma once

namespace gossamer {

// Makes ours the allocator of CPU symmetric memory; once, when the module is imported.
void register_symmetric_memory();

}  // namespace gossamer
