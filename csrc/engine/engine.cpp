// See engine.h.
#include "engine/engine.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "backend/gil.h"
#include "device_kernels.h"
#include "engine/outermost.h"
#include "engine/owners.h"

namespace gossamer {

Engine::Engine(CommunicatorPtr comm, CommunicatorPtr control, std::vector<at::Tensor> params,
               std::vector<std::string> names, std::function<void()> on_late,
               std::function<void(std::vector<int64_t>)> on_order)
    : worker_(std::move(comm), std::move(control)),
      hooks_(std::move(params), std::move(names), mutex_),
      flight_(worker_, mutex_),
      join_(worker_, mutex_),
      endings_{
          {parts_, std::move(on_late), std::move(on_order)}, Alone(parts_), {parts_, endings_.lockstep}} {
  flight_.weigh_by([this] { return join_.weight(); });
}

void Engine::close(std::string why) {
  // A Python task on the worker may need the GIL that this thread holds.
  const WithoutGil without_gil;
  bool in_backward = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (worker_.closed()) return;
    worker_.mark_closed(std::move(why));
    hooks_.remove();
    release(*this);
    in_backward = in_backward_;
  }
  worker_.stop(in_backward || worker_.executor().running());
}

void Engine::clear_buckets() {
  worker_.check_alive();
  const std::lock_guard<std::mutex> lock(mutex_);
  flight_.clear();
  hooks_.forget_plan();
  reset();
}

void Engine::append_bucket(const std::shared_ptr<Bucket>& bucket, std::shared_ptr<BucketWork> work) {
  worker_.check_alive();
  for (size_t i = 0; i < bucket->params().size(); ++i)
    claim(bucket->params()[i], bucket->names()[i], shared_from_this());
  const std::lock_guard<std::mutex> lock(mutex_);
  hooks_.adopt(bucket, flight_.plan().size(), [engine = weak_from_this()](int64_t index, bool arrived) {
    if (const auto alive = engine.lock()) alive->on_gradient(index, arrived);
  });
  flight_.append(bucket, std::move(work));
  reset();
}

void Engine::reset() {
  hooks_.reset();
  flight_.reset(hooks_.awaited(flight_.plan().size()));
  endings_.lockstep.reset();
  in_backward_ = false;
  until_end_.reset();
  graph_task_ = -1;
}

void Engine::resume(int64_t step, int64_t optimizer_steps) {
  worker_.check_alive();
  worker_.set_step(step);
  endings_.lockstep.set_optimizer_steps(optimizer_steps);
  endings_.lockstep.forget_frozen();
  endings_.lockstep.set_order_shared(step > 0);
}

void Engine::end_by(Ending& ending) {
  const std::lock_guard<std::mutex> lock(mutex_);
  chosen_ = &ending;
  if (!in_backward_) ending_ = &ending;
}

void Engine::output_gradient() {
  if (!inside_backward_of_all()) return;
  if (!output_sync()) return mute();
  const int graph_task = torch::autograd::get_current_graph_task_id();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!hooks_.any_trainable()) return endings_.lockstep.count_frozen(graph_task);
    if (in_backward_ && graph_task_ != -1 && graph_task_ != graph_task) lose_backward();
    graph_task_ = graph_task;
  }
  begin(/*of_output=*/true);
}

// The gradients of this backward stay on this rank, whatever holds where it runs.
void Engine::mute() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!muted_.expired()) return;
  const auto token = std::make_shared<int>();
  muted_ = token;
  at_end_of_outermost_backward([token] {});
}

bool Engine::begin(bool of_output) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool follows_output = of_output || (in_backward_ && output_sync_ > 0);
    if (!follows_output && (!sync_ || !muted_.expired())) return false;
    // autograd drops the callback of a backward that raises. A forward completes it, but one of the bare model does not.
    if (in_backward_ && until_end_ && until_end_->expired()) lose_backward();
    if (in_backward_ || worker_.closed()) return true;
    worker_.check_alive();
    check_capture();
    join_.begin_backward();
    in_backward_ = true;
    ending_ = chosen_;
    hooks_.begin_backward();
    try {
      hooks_.survey_locked();
    } catch (const RaisedError& error) {
      hooks_.remember_failure(error.kind, error.message);
    }
    if (ending_->ends_with_backward()) {
      const auto token = std::make_shared<int>();
      until_end_ = token;
      at_end_of_outermost_backward([engine = weak_from_this(), token] {
        if (const auto alive = engine.lock()) alive->finish(/*abandoned=*/false);
      });
    }
  }
  if (on_begin_) on_begin_();
  return true;
}

// That backward never reached its end, and the next one counts on top of its gradients.
void Engine::lose_backward() {
  hooks_.remember_failure(ErrorKind::comm, "its previous backward raised before it ended");
  in_backward_ = false;
}

void Engine::on_gradient(int64_t index, bool arrived) {
  if (!chosen_.load()->takes_gradients() || !begin(/*of_output=*/false)) return;
  Ending* ending = nullptr;
  bool has_gradient = false;
  uint64_t sent = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (worker_.closed()) return;
    ending = ending_;
    const auto arrival = hooks_.arrive(index, arrived);
    if (arrival == Hooks::Arrival::surplus) ending->surplus(index);
    if (arrival != Hooks::Arrival::complete) return;
    const auto [bucket, position] = hooks_.position(index);
    flight_.gradient_complete(bucket, position, *ending);
    has_gradient = hooks_.has_gradient(index);
    sent = flight_.last_sent();
  }
  worker_.keep_order(sent);
  if (has_gradient) ending->gradient_complete(index);
}

void Engine::abandon() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!in_backward_) return;
    hooks_.remember_failure(ErrorKind::comm, "its backward raised before it ended");
  }
  finish(/*abandoned=*/true);
}

void Engine::end_round() {
  worker_.check_alive();
  begin(/*of_output=*/false);  // in case no gradient has come
  finish(/*abandoned=*/false);
}

bool Engine::shadow() {
  if (!join_.answer_roll()) return false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    worker_.check_alive();
    join_.begin_shadow();
    hooks_.drop_gradients();
    in_backward_ = true;
    ending_ = chosen_;
    hooks_.begin_backward();
  }
  finish(/*abandoned=*/false);
  return true;
}

void Engine::redo() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    worker_.check_alive();
    join_.begin_backward();
    in_backward_ = true;
    ending_ = chosen_;
    hooks_.begin_backward();
  }
  finish(/*abandoned=*/false);
}

void Engine::finish(bool abandoned) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (worker_.closed()) return;  // a hook closed it in the middle of this backward
  }
  struct Reset {
    Engine& engine;
    ~Reset() {
      const std::lock_guard<std::mutex> lock(engine.mutex_);
      engine.reset();
      engine.join_.end_backward();
    }
  } reset{*this};
  ending_->end(abandoned);
}

std::string Engine::capture_refusal() const {
  if (const auto reason = worker_.comm().capture_refusal(); !reason.empty()) return reason;
  for (const auto& planned : flight_.plan()) {
    if (const auto reason = planned.work->capture_refusal(); !reason.empty()) return reason;
  }
  if (endings_.lockstep.on_end()) return "autotune is still measuring";
  if (join_.started())
    return "it is in join(), where the ranks tell each other before each step who has input";
  if (join_.counts()) return "its mean is weighted by count(), by the samples of one step";
  if (hooks_.late()) return "a parameter has become trainable, and its bucket is made in the next step";
  if (!endings_.lockstep.order_shared()) {
    return "no synchronised backward has ended yet, and the first one makes the buckets anew; run some steps "
           "before";
  }
  if (const auto name = hooks_.on_default_stream()) {
    return "parameter '" + *name +
           "' was wrapped on the default stream, which no graph can hold; wrap the model under "
           "torch.cuda.stream(...), and run the steps before the capture there too";
  }
  return "";
}

void Engine::check_capture() const {
  const auto device = worker_.comm().device();
  if (device.is_cpu() || !device_kernels(device.type()).is_capturing()) return;
  const auto reason = capture_refusal();
  check_argument(reason.empty(), worker_.place(), ": a CUDA graph cannot capture this step: ", reason);
}

}  // namespace gossamer
