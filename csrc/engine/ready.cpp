// Readiness: hooks on autograd's gradient accumulators that count, check and timestamp gradients. C++ only, so
// backward never waits for the GIL here. The rest of Engine is in engine.cpp.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <sstream>
#include <utility>

#include "engine/engine.h"

namespace gossamer {
namespace {

using torch::autograd::variable_list;

// Compiled autograd would bake the hook's id into its cache key; the hook itself has no state to describe.
void no_compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) {
  TORCH_CHECK(false, "gossamer: compiled autograd is not supported; compile the model, not its backward");
}

}  // namespace

void Engine::add_hook(int64_t index) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  if (slot.remove_hook) return;
  auto accumulator = torch::autograd::impl::grad_accumulator(params_[static_cast<size_t>(index)]);
  auto* node = accumulator.get();
  const auto key = node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [engine = weak_from_this(), index](const variable_list& outputs, const variable_list& inputs) {
        const bool arrived = !inputs.empty() && inputs[0].defined();
        if (const auto alive = engine.lock()) alive->on_gradient(index, arrived);
        return outputs;
      },
      no_compiled_args));
  slot.node = node;
  slot.accumulator = std::make_shared<decltype(accumulator)>(std::move(accumulator));
  slot.remove_hook = [node, key] { node->del_post_hook(key); };
}

std::vector<int64_t> Engine::survey() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return survey_locked();
}

std::vector<int64_t> Engine::survey_locked() {
  std::vector<int64_t> outside;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.bucket < 0) {
      if (params_[i].requires_grad()) outside.push_back(static_cast<int64_t>(i));
      continue;
    }
    const Bucket& bucket = *buckets_[static_cast<size_t>(slot.bucket)].bucket;
    if (torch::autograd::impl::try_get_grad_accumulator(params_[i]).get() != slot.node ||
        params_[i].numel() != bucket.numel_of(slot.position)) {
      std::ostringstream text;
      text << "engine: parameter '" << names_[i] << "' was wrapped as " << bucket.dtype() << " on "
           << bucket.device() << " and has been converted or moved since (it is " << params_[i].scalar_type()
           << " on " << params_[i].device()
           << " now); close() the wrapper, convert or move the model, and wrap it again";
      throw PythonError(ErrorKind::config, text.str());
    }
  }
  late_ = !outside.empty();
  return outside;
}

void Engine::begin_forward() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& slot : slots_) slot.reached = false;
  left_out_.clear();
  left_out_somewhere_ = false;
}

bool Engine::inside_backward() const { return torch::autograd::get_current_graph_task_id() != -1; }

void Engine::output_gradient() {
  const auto* chosen_inputs = torch::autograd::get_current_graph_task_exec_info();
  if (!sync_ || (chosen_inputs != nullptr && !chosen_inputs->empty())) return;
  const int graph_task = torch::autograd::get_current_graph_task_id();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (in_backward_ && graph_task_ != -1 && graph_task_ != graph_task) {
      // Its end was never reached, and this backward counts on top of what it left behind.
      remember_failure(ErrorKind::comm, "its previous backward raised before it ended");
      in_backward_ = false;
    }
    graph_task_ = graph_task;
  }
  begin_backward();
}

void Engine::begin_backward() {
  if (!sync_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (in_backward_ || closed_) return;
  check_alive();
  check_capture();
  if (join_ && !roll_) call_roll_locked(/*present=*/true);
  in_backward_ = true;
  in_lockstep_ = lockstep_;
  arrival_.clear();
  if (passes_) return begin_round_locked();
  torch::autograd::Engine::get_default_engine().queue_callback([engine = weak_from_this()] {
    if (const auto alive = engine.lock()) alive->finish(/*abandoned=*/false);
  });
}

void Engine::on_gradient(int64_t index, bool arrived) {
  if (!sync_ || (passes_ && broken_)) return;  // a round's end says so
  begin_backward();
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = slots_[static_cast<size_t>(index)];
  if (closed_ || slot.bucket < 0 || awaits_more(index)) return;
  slot.has_gradient = params_[static_cast<size_t>(index)].grad().defined();
  if (arrived && !slot.has_gradient) {
    remember_failure(
        ErrorKind::config,
        "parameter '" + names_[static_cast<size_t>(index)] +
            "' lost its gradient to a hook before it was averaged, as an optimizer that steps inside "
            "backward does; step after backward()");
  }
  if (check_gradient(index) && comm_->device().is_cpu()) {
    const Planned& planned = buckets_[static_cast<size_t>(slot.bucket)];
    planned.bucket->take(slot.position, planned.work->gather_scale(*comm_));
  }
  if (observe::tracing()) {  // its name is made only then
    const std::string text = "gradient " + names_[static_cast<size_t>(index)];
    observe::instant(text, buckets_[static_cast<size_t>(slot.bucket)].bucket->index(), step_);
  }
  slot.ready = true;
  arrival_.push_back(index);
  Progress& progress = progress_[static_cast<size_t>(slot.bucket)];
  record_event(progress);
  if (--progress.pending == 0) fire_locked(/*everything=*/false);
}

// Counts the gradient that has just come, and whether it is to be left alone until others have come on top of it.
bool Engine::awaits_more(int64_t index) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  ++slot.arrivals;
  if (static_graph_ && !counted_) {
    check_gradient(index);
    if (slot.arrivals == 1) arrival_.push_back(index);
    return true;
  }
  if (slot.arrivals <= slot.expected) return slot.arrivals < slot.expected;
  const std::string what = "parameter '" + names_[static_cast<size_t>(index)] + "' ";
  if (passes_) {
    throw AssertionError(
        place() + ": " + what + "got its gradient more often than backward_passes_per_step (" +
        std::to_string(*passes_) + ") allows before step(); call step() or synchronize() first, " +
        "or give a larger backward_passes_per_step");
  }
  remember_failure(ErrorKind::config,
                   static_graph_
                       ? what + "got its gradient " + std::to_string(slot.arrivals) +
                             " times in one backward, and " + std::to_string(slot.expected) +
                             " times in the first; with static_graph=True all must be alike"
                       : what +
                             "got its gradient twice in one backward, which a reentrant checkpoint does to a "
                             "parameter that it shares; use torch.utils.checkpoint with use_reentrant=False");
  return true;
}

bool Engine::check_gradient(int64_t index) {
  const at::Tensor& param = params_[static_cast<size_t>(index)];
  const at::Tensor& grad = param.grad();
  // Only a failure needs it: this runs for every gradient of every backward.
  const auto name = [&] { return "parameter '" + names_[static_cast<size_t>(index)] + "' "; };
  if (!grad.defined()) return true;
  if (grad.layout() != at::kStrided) {
    remember_failure(ErrorKind::config, name() +
                                            "has a sparse gradient, which is not supported yet; build its "
                                            "layer with sparse=False");
    return false;
  }
  const Bucket& bucket = *buckets_[static_cast<size_t>(slots_[static_cast<size_t>(index)].bucket)].bucket;
  if (grad.scalar_type() != bucket.dtype() || grad.device() != bucket.device()) {
    std::ostringstream text;
    text << name() << "has a gradient of " << grad.scalar_type() << " on " << grad.device()
         << ", but was wrapped as " << bucket.dtype() << " on " << bucket.device()
         << "; convert or move the model before wrapping it";
    remember_failure(ErrorKind::config, text.str());
    return false;
  }
  if (grad.requires_grad() && bucket.has("grad")) {
    remember_failure(ErrorKind::config,
                     name() +
                         "has a gradient with a graph (create_graph=True), which cannot be "
                         "averaged in place; run that backward under no_sync()");
    return false;
  }
  return true;
}

// One event per bucket and producing stream; recording again supersedes the earlier one.
void Engine::record_event(Progress& progress) {
  const auto side = executor_->side_stream();
  if (!side) return;
  const c10::impl::VirtualGuardImpl guard(side->device_type());
  const auto stream = guard.getStream(side->device());
  for (auto& [known, event] : progress.events) {
    if (known == stream) return event.record(stream);
  }
  progress.events.emplace_back(stream, c10::Event(side->device_type()));
  progress.events.back().second.record(stream);
}

void Engine::remember_failure(ErrorKind kind, const std::string& text) {
  if (!failure_) failure_.emplace(kind, text);
}

}  // namespace gossamer
