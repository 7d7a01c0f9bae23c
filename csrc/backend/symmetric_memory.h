// torch's symmetric memory for CPU tensors: torch.distributed._symmetric_memory.empty(..., device="cpu") and
// rendezvous() over a process group of the backend "gossamer".
#pragma once

namespace gossamer {

// Makes our allocator torch's allocator of CPU symmetric memory. Called once, when the module is imported.
void register_symmetric_memory();

}  // namespace gossamer
