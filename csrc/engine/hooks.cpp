// See hooks.h.
#include "engine/hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <sstream>

namespace gossamer {
namespace {

using torch::autograd::variable_list;
using torch::autograd::utils::LambdaPostHook;

// Compiled autograd would put the hook's id into its cache key; the hook itself has no state to describe.
void no_compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) {
  TORCH_CHECK(false, "gossamer: compiled autograd is not supported; compile the model, not its backward");
}

[[noreturn]] void raise_changed(const at::Tensor& param, const std::string& name, const Bucket& bucket,
                                int64_t numel) {
  const auto describe = [](at::ScalarType dtype, at::Device device, int64_t elements) {
    return std::to_string(elements) + " elements of " + c10::toString(dtype) + " on " + device.str();
  };
  const auto before = describe(bucket.dtype(), bucket.device(), numel);
  const auto now = describe(param.scalar_type(), param.device(), param.numel());
  raise_python(ErrorKind::config, "engine: parameter '", name, "' was wrapped as ", before,
               before == now ? ", and has been converted or moved, and back, since; that removed its hook"
                             : " and has been converted, moved or resized since (it is " + now + " now)",
               "; close() the wrapper, change the model, and wrap it again");
}

}  // namespace

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

bool inside_backward_of_all() {
  const auto* chosen_inputs = torch::autograd::get_current_graph_task_exec_info();
  return inside_backward() && (chosen_inputs == nullptr || chosen_inputs->empty());
}

Hooks::Hooks(std::vector<at::Tensor> params, std::vector<std::string> names, std::mutex& mutex)
    : params_(std::move(params)), names_(std::move(names)), mutex_(mutex), slots_(params_.size()) {}

void Hooks::begin_forward() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& slot : slots_) slot.reached = false;
  left_out_.clear();
  left_out_somewhere_ = false;
}

std::vector<int64_t> Hooks::survey() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return survey_locked();
}

std::vector<int64_t> Hooks::survey_locked() {
  std::vector<int64_t> outside;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.bucket) {
      if (params_[i].requires_grad()) outside.push_back(static_cast<int64_t>(i));
      continue;
    }
    if (torch::autograd::impl::try_get_grad_accumulator(params_[i]).get() != slot.node ||
        params_[i].numel() != slot.bucket->numel_of(slot.position)) {
      raise_changed(params_[i], names_[i], *slot.bucket, slot.bucket->numel_of(slot.position));
    }
  }
  late_ = !outside.empty();
  return outside;
}

std::optional<std::string> Hooks::on_default_stream() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].bucket || slots_[i].node == nullptr) continue;
    // autograd hands gradients over on the stream that was current when the hook was made. The legacy default stream
    // cannot be part of a capture.
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(params_[i]);
    const auto stream = accumulator ? accumulator->stream() : std::nullopt;
    if (stream && stream->id() == 0) return names_[i];
  }
  return std::nullopt;
}

void Hooks::adopt(const std::shared_ptr<Bucket>& bucket, size_t number, const Listener& listener) {
  for (size_t position = 0; position < bucket->indices().size(); ++position) {
    const int64_t index = bucket->indices()[position];
    Slot& slot = slots_.at(static_cast<size_t>(index));
    slot.bucket = bucket;
    slot.number = number;
    slot.position = position;
    if (!slot.remove_hook) add_hook(index, listener);
  }
}

void Hooks::add_hook(int64_t index, const Listener& listener) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  auto accumulator = torch::autograd::impl::grad_accumulator(params_[static_cast<size_t>(index)]);
  auto* node = accumulator.get();
  auto hook = std::make_unique<LambdaPostHook>(
      [listener, index](const variable_list& outputs, const variable_list& inputs) {
        listener(index, !inputs.empty() && inputs[0].defined());
        return outputs;
      },
      no_compiled_args);
  slot.hook = hook.get();
  const auto key = node->add_post_hook(std::move(hook));
  slot.node = node;
  slot.accumulator = std::make_shared<decltype(accumulator)>(std::move(accumulator));
  slot.remove_hook = [node, key] { node->del_post_hook(key); };
}

void Hooks::forget_plan() {
  for (auto& slot : slots_) slot.bucket.reset();
}

void Hooks::remove() {
  for (auto& slot : slots_) {
    if (slot.remove_hook) slot.remove_hook();
    slot = Slot{};
  }
}

void Hooks::reset() {
  for (auto& slot : slots_) {
    slot.ready = slot.has_gradient = false;
    slot.arrivals = 0;
    if (passes_) slot.expected = *passes_;
  }
  failure_.reset();
}

void Hooks::expect(int64_t passes) {
  passes_ = passes;
  for (auto& slot : slots_) {
    if (!slot.ready) slot.expected = slot.arrivals + passes;
  }
}

std::vector<int64_t> Hooks::awaited(size_t buckets) const {
  std::vector<int64_t> counts(buckets);
  for (const auto& slot : slots_) {
    if (slot.bucket && slot.expected > 0) ++counts[slot.number];
  }
  return counts;
}

Hooks::Arrival Hooks::arrive(int64_t index, bool arrived) {
  Slot& slot = slots_[static_cast<size_t>(index)];
  if (!slot.bucket) return Arrival::none;
  require_own(index);
  ++slot.arrivals;
  if (counting()) {
    check_gradient(index);
    if (slot.arrivals == 1) order_.push_back(index);
    return Arrival::none;
  }
  if (slot.arrivals > slot.expected) return Arrival::surplus;
  if (slot.arrivals < slot.expected) return Arrival::none;
  const at::Tensor& param = params_[static_cast<size_t>(index)];
  slot.has_gradient = param.grad().defined();
  if (arrived && !slot.has_gradient &&
      param.requires_grad()) {  // autograd gives none to one that was frozen meanwhile
    remember_failure(
        ErrorKind::config,
        "parameter '" + name(index) +
            "' lost its gradient to a hook before it was averaged, as an optimizer that steps inside "
            "backward does; step after backward()");
  }
  check_gradient(index);
  slot.ready = true;
  order_.push_back(index);
  return Arrival::complete;
}

std::pair<size_t, size_t> Hooks::position(int64_t index) const {
  const Slot& slot = slots_[static_cast<size_t>(index)];
  return {slot.number, slot.position};
}

void Hooks::refuse_surplus(int64_t index) {
  const Slot& slot = slots_[static_cast<size_t>(index)];
  const std::string what = "parameter '" + name(index) + "' ";
  remember_failure(ErrorKind::config,
                   static_graph_
                       ? what + "got its gradient " + std::to_string(slot.arrivals) +
                             " times in one backward, and " + std::to_string(slot.expected) +
                             " times in the first; with static_graph=True all must be alike"
                       : what +
                             "got its gradient twice in one backward, which a reentrant checkpoint does to a "
                             "parameter that it shares; use torch.utils.checkpoint with use_reentrant=False");
}

// torch's DistributedDataParallel takes each gradient in a hook of the same kind. One that was made before this wrapper
// does nothing in this wrapper's backwards. One that was made later would average what this wrapper has averaged. It has
// not run yet, and goes on to work once this wrapper is closed.
void Hooks::require_own(int64_t index) const {
  const Slot& slot = slots_[static_cast<size_t>(index)];
  const auto accumulator =
      torch::autograd::impl::try_get_grad_accumulator(params_[static_cast<size_t>(index)]);
  if (!accumulator || !slot.bucket->has("grad")) return;
  const auto& hooks = accumulator->post_hooks();
  for (auto hook = hooks.rbegin(); hook != hooks.rend() && hook->get() != slot.hook; ++hook) {
    if (dynamic_cast<const LambdaPostHook*>(hook->get()) == nullptr) continue;
    raise_python(
        ErrorKind::config, "engine: parameter '", names_[static_cast<size_t>(index)],
        "' was wrapped in torch's DistributedDataParallel after Gossamer had it, and both would average its "
        "gradient; close() or delete Gossamer's wrapper or optimizer first");
  }
}

// Bucket::take and gather do not touch a gradient that this refuses.
void Hooks::check_gradient(int64_t index) {
  const at::Tensor& grad = params_[static_cast<size_t>(index)].grad();
  // Only a failure needs it: this runs for every gradient of every backward.
  const auto what = [&] { return "parameter '" + name(index) + "' "; };
  if (!grad.defined()) return;
  if (grad.layout() != at::kStrided) {
    return remember_failure(ErrorKind::config, what() +
                                                   "has a sparse gradient, which is not supported yet; build "
                                                   "its layer with sparse=False");
  }
  const Bucket& bucket = *slots_[static_cast<size_t>(index)].bucket;
  if (grad.scalar_type() != bucket.dtype() || grad.device() != bucket.device()) {
    std::ostringstream text;
    text << what() << "has a gradient of " << grad.scalar_type() << " on " << grad.device()
         << ", but was wrapped as " << bucket.dtype() << " on " << bucket.device()
         << "; convert or move the model before wrapping it";
    return remember_failure(ErrorKind::config, text.str());
  }
  if (grad.requires_grad() && bucket.has("grad")) {
    remember_failure(ErrorKind::config,
                     what() +
                         "has a gradient with a graph (create_graph=True), which cannot be "
                         "averaged in place; run that backward under no_sync()");
  }
}

bool Hooks::any_trainable() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const at::Tensor& param) { return param.requires_grad(); });
}

bool Hooks::any_complete() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.ready; });
}

void Hooks::drop_gradients() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].bucket) params_[i].mutable_grad().reset();
  }
}

std::vector<bool> Hooks::used() const {
  std::vector<bool> used;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    used.push_back(slot.bucket && (slot.ready ? slot.has_gradient : params_[i].grad().defined()));
  }
  return used;
}

std::vector<int64_t> Hooks::unreached() const {
  std::vector<int64_t> unreached;
  for (size_t i = 0; i < slots_.size() && !counting(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.bucket && !slot.ready && !slot.reached && slot.expected > 0)
      unreached.push_back(static_cast<int64_t>(i));
  }
  return unreached;
}

bool Hooks::has_gradient(int64_t index) const {
  const Slot& slot = slots_[static_cast<size_t>(index)];
  return slot.ready && slot.has_gradient;
}

std::vector<int64_t> Hooks::incomplete() const {
  std::vector<int64_t> incomplete;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].bucket && !has_gradient(static_cast<int64_t>(i)))
      incomplete.push_back(static_cast<int64_t>(i));
  }
  return incomplete;
}

void Hooks::take_stock(bool counts, std::optional<bool> left_out_somewhere) {
  left_out_ = counts ? unreached() : std::vector<int64_t>();
  left_out_somewhere_ = left_out_somewhere.value_or(!left_out_.empty());
  for (auto& slot : slots_) slot.reached |= slot.ready;
  if (!counting() || !counts) return;
  for (auto& slot : slots_) {
    if (slot.bucket) slot.expected = slot.arrivals;
  }
  counted_ = true;
}

void Hooks::remember_failure(ErrorKind kind, const std::string& text) {
  if (!failure_) failure_.emplace(kind, text);
}

}  // namespace gossamer
