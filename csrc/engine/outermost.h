// The end of a whole backward. A reentrant checkpoint runs a backward inside another one, and autograd's own callbacks
// come at the end of the inner one.
#pragma once

#include <functional>

namespace gossamer {

// Within a backward: calls `end` once, in the thread that ends the outermost backward, when that one has ended.
void at_end_of_outermost_backward(std::function<void()> end);

}  // namespace gossamer
