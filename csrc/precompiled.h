// Torch's large headers, compiled once per build and read back by every file that uses torch (setup.py); half of
// such a file's compile time is theirs. Nothing of ours belongs here: each file still includes what it uses.
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
