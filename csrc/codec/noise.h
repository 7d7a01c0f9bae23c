// Random numbers for stochastic rounding, drawn by position: element i of row r of a call with key k always gets
// the same fraction, whatever instruction set, thread or launch computes it. Counter-based: no state.
// A row's 64-bit key is the call's, mixed with the row number; the numbers themselves are Lane::drawn
// (base/lanes.h). Included by the drivers and by codec.cpp, which makes the keys of calls.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace gossamer::GOSSAMER_ISA {

constexpr int64_t kReducedRow = -1;  // the row number of reduce_encode's output; no row of a matrix has it

// The finaliser of splitmix64 (Steele, Lea, Flood 2014), one step from x: a bijection of 64 bits.
HD uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct Noise {
  bool on;
  uint32_t first, second;  // the halves of the row's key
};

HD Noise noise_of_row(uint64_t key, int64_t row) {
  const uint64_t mixed = mix64(key ^ mix64(static_cast<uint64_t>(row)));
  return {key != 0, static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)};
}

}  // namespace gossamer::GOSSAMER_ISA
