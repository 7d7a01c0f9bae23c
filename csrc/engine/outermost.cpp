// See outermost.h.
#include "engine/outermost.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>
#include <utility>

namespace gossamer {
namespace {

using torch::autograd::variable_list;

// On a node of the outer backward. Armed anew for each inner one, because a leaf's node outlives its backward.
class Again : public torch::autograd::FunctionPreHook {
 public:
  void arm(std::function<void()> end) { end_ = std::move(end); }
  bool armed() const { return end_ != nullptr; }

  variable_list operator()(const variable_list& grads) override {
    if (auto end = std::exchange(end_, nullptr)) at_end_of_outermost_backward(std::move(end));
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  std::function<void()> end_;
};

void arm(torch::autograd::Node& node, std::function<void()> end) {
  for (const auto& hook : node.pre_hooks()) {
    auto* again = dynamic_cast<Again*>(hook.get());
    if (again != nullptr && !again->armed()) return again->arm(std::move(end));
  }
  auto again = std::make_unique<Again>();
  again->arm(std::move(end));
  node.add_pre_hook(std::move(again));
}

}  // namespace

// The thread that runs an inner backward is evaluating the node of the outer one that has called it. The nodes after that
// one are evaluated when it has returned, even if no gradient flows to them.
void at_end_of_outermost_backward(std::function<void()> end) {
  torch::autograd::Engine::get_default_engine().queue_callback([end = std::move(end)]() mutable {
    if (const auto outer = torch::autograd::get_current_node()) {
      for (const auto& edge : outer->next_edges()) {
        if (edge.is_valid()) return arm(*edge.function, std::move(end));
      }
    }
    end();
  });
}

}  // namespace gossamer
