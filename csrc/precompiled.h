// Torch's large headers, compiled once per build and reused by every file that uses torch (setup.py); they take most of
// such a file's compile time. Nothing of ours belongs here: each file still includes what it uses. pybind11 does not
// belong here either: it adds five seconds to each compile.
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
