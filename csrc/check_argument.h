// The check of arguments that a user gives to an operation of torch.ops.gossamer. Used by ops_*.cpp.
#pragma once

#include <sstream>

#include "errors.h"

namespace gossamer {

// Throws PythonError(config) unless ok; the text is the parts.
template <class... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  (message << ... << parts);
  throw PythonError(ErrorKind::config, message.str());
}

}  // namespace gossamer
