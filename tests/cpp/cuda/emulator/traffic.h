// Counts the bytes that kernels read and write in watched memory. GCC's -fsanitize=thread puts a call before every access to
// memory; traffic.cpp has these calls in place of ThreadSanitizer's. So kernels need no text for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

// What kernels have done in watched memory. Distinct bytes are those that a launch must move: where it reads a byte twice,
// caches may serve the second time.
struct Traffic {
  int64_t read, written;           // distinct bytes
  int64_t read_at_all;             // a byte counts as often as it is read
  int64_t widest_loads, launches;  // loads of 16 bytes
};

void watch(const void* memory, size_t bytes);
void forget(const void* memory);
Traffic take_traffic();  // since the last call; every byte is distinct again

}  // namespace emulator
