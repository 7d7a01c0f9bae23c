// Included before a file with the faults of tests/repository/faults.py: the environment says which of them a run has.
#pragma once

#include <cstdlib>

inline const char* const emulator_fault = std::getenv("EMULATOR_FAULT");
inline const int chosen_fault = emulator_fault == nullptr ? -1 : std::atoi(emulator_fault);
inline bool fault_is(int number) { return number == chosen_fault; }
