// The moments of a step: a gradient arrives, a bucket fires, the backward ends. See engine.h; the hooks
// themselves are in ready.cpp.
#include "engine/engine.h"

#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>

#include <sstream>
#include <utility>

namespace gossamer {
namespace {

constexpr auto kAgreement = "agreement";  // as an observer sees it

}  // namespace

Engine::Engine(CommunicatorPtr comm, CommunicatorPtr control, std::vector<at::Tensor> params,
               std::vector<std::string> names, std::function<void()> on_late,
               std::function<void(std::vector<int64_t>)> on_order)
    : comm_(std::move(comm)),
      control_(std::move(control)),
      params_(std::move(params)),
      names_(std::move(names)),
      on_late_(std::move(on_late)),
      on_order_(std::move(on_order)),
      slots_(params_.size()),
      executor_(std::make_unique<Executor>(comm_->device())) {}

Engine::~Engine() { close(); }

void Engine::close() {
  // A Python task on the worker may need the GIL that this thread holds.
  std::optional<pybind11::gil_scoped_release> release;
  if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (auto& slot : slots_) {
      if (slot.remove_hook) slot.remove_hook();
      slot = Slot{};
    }
  }
  // An operation that waits for other ranks, and ranks that wait for this one, would go on for the whole timeout.
  if (in_backward_ || executor_->busy()) announce_failure();
  executor_->stop();
}

void Engine::announce_failure() noexcept {
  comm_->announce_failure();
  if (control_ != comm_) control_->announce_failure();
}

void Engine::check_alive() const {
  if (closed_) throw PythonError(ErrorKind::config, "this engine is closed; wrap the model again");
  if (broken_) throw PythonError(ErrorKind::comm, "this engine stopped: " + *broken_);
  if (stopped_) throw PythonError(ErrorKind::comm, "this engine stopped: " + stall_facts());
}

std::string Engine::place() const {
  std::ostringstream text;
  text << "rank " << comm_->rank() << "/" << comm_->size() << " step " << step_.load();
  return text.str();
}

void Engine::clear_buckets() {
  check_alive();
  const std::lock_guard<std::mutex> lock(mutex_);
  buckets_.clear();
  kept_.clear();
  for (auto& slot : slots_) slot.bucket = -1;
  reset_locked();
}

void Engine::append_bucket(const std::shared_ptr<Bucket>& bucket, std::shared_ptr<BucketWork> work) {
  check_alive();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t position = 0; position < bucket->indices().size(); ++position) {
    const int64_t index = bucket->indices()[position];
    Slot& slot = slots_.at(static_cast<size_t>(index));
    slot.bucket = static_cast<int64_t>(buckets_.size());
    slot.position = position;
    add_hook(index);
    const at::Tensor& param = params_[static_cast<size_t>(index)];
    if (bucket->has("grad") && param.grad().defined() && param.grad().layout() == at::kStrided) {
      const at::Tensor& view = bucket->views("grad")[position];
      view.copy_(param.grad().detach());
      param.mutable_grad() = view;
    }
  }
  buckets_.push_back({bucket, std::move(work)});
  reset_locked();
}

void Engine::reset_locked() {
  progress_.clear();
  progress_.resize(buckets_.size());
  for (auto& slot : slots_) {
    slot.ready = slot.has_gradient = false;
    slot.arrivals = 0;
    if (passes_) slot.expected = *passes_;
    if (slot.bucket >= 0 && slot.expected > 0) ++progress_[static_cast<size_t>(slot.bucket)].pending;
  }
  next_ = 0;
  round_.reset();
  failure_.reset();
  in_backward_ = false;
}

// Submits buckets in plan order: those that are complete, or every one that is left.
void Engine::fire_locked(bool everything) {
  // Looked at before anything is submitted: from then on the worker owns the gradients of that bucket.
  const auto used = everything ? used_locked() : std::vector<bool>();
  while (next_ < buckets_.size() && (everything || progress_[next_].pending == 0)) {
    const bool last = next_ + 1 == buckets_.size();
    // All gradients are accounted for when the last bucket goes, and its flight hides the agreement's.
    if (last && in_lockstep_) submit_agreement_locked(everything ? used : used_locked());
    // Buckets without a gradient of this backward still follow what the caller's stream did to their memory.
    if (everything) record_event(progress_[next_]);
    submit_bucket_locked(next_++);
    // Waited for here too: the caller's wait for the worker can be interrupted, this operation's cannot.
    if (last && in_lockstep_) executor_->submit([round = round_] { round->wait(); }, kAgreement);
  }
  if (everything && in_lockstep_ && !round_)
    submit_agreement_locked(used);  // a plan without buckets, after a failed re-plan
}

// Which parameters have a gradient: those that just got one, or that were left out but kept an earlier one.
std::vector<bool> Engine::used_locked() const {
  std::vector<bool> used;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    used.push_back(slot.bucket >= 0 && (slot.ready ? slot.has_gradient : params_[i].grad().defined()));
  }
  return used;
}

std::vector<int64_t> Engine::left_out_locked() const {
  std::vector<int64_t> left_out;
  if (shadowing_ || (static_graph_ && !counted_)) return left_out;
  for (const auto& planned : buckets_) {
    for (const int64_t index : planned.bucket->indices()) {
      const Slot& slot = slots_[static_cast<size_t>(index)];
      if (!slot.ready && !slot.reached && slot.expected > 0) left_out.push_back(index);
    }
  }
  return left_out;
}

// What this backward has brought: before the plan grows, which forgets it.
void Engine::take_stock(std::optional<bool> left_out_somewhere) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_out_ = left_out_locked();
  left_out_somewhere_ = left_out_somewhere.value_or(!left_out_.empty());
  for (auto& slot : slots_) slot.reached |= slot.ready;
  if (!static_graph_ || counted_ || shadowing_) return;
  for (auto& slot : slots_) {
    if (slot.bucket >= 0) slot.expected = slot.arrivals;
  }
  counted_ = true;
}

void Engine::submit_agreement_locked(const std::vector<bool>& used) {
  const auto steps = shadowing_ ? std::nullopt : std::optional<int64_t>(optimizer_steps_);
  const bool left_out = !left_out_locked().empty();
  round_ = std::make_shared<AgreementRound>(*control_, steps, failure_.has_value(), late_, left_out, used);
  executor_->submit([round = round_] { round->start(); }, kAgreement);
}

void Engine::submit_bucket_locked(size_t index) {
  auto events = std::make_shared<Events>(std::move(progress_[index].events));
  const auto& bucket = *buckets_[index].bucket;
  observe::instant("bucket queued", bucket.index(), step_, bucket.bytes());
  const auto run = [this, planned = buckets_[index], events] {
    run_guarded(planned.bucket->describe(), [&] { run_bucket(planned, *events); });
  };
  executor_->submit(run, "bucket", bucket.index());
}

void Engine::run_bucket(const Planned& planned, Events& events) {
  if (const auto side = executor_->side_stream()) {
    for (auto& [stream, event] : events) event.block(*side);
  }
  planned.bucket->set_step(step_);
  observe::context().step = step_;
  {
    const observe::Span span("gather", "memory", planned.bucket->bytes());
    planned.bucket->gather(planned.work->gather_scale(*comm_));
  }
  if (keeps_gradients_) keep(*planned.bucket);
  planned.work->run(*comm_, planned.bucket);
}

void Engine::submit(std::function<void()> task, const std::string& what) {
  check_alive();
  executor_->submit_behind_current([this, task = std::move(task), what] { run_guarded(what, task); }, what);
}

void Engine::resume(int64_t step, int64_t optimizer_steps) {
  check_alive();
  step_ = step;
  optimizer_steps_ = optimizer_steps;
  order_shared_ = step > 0;
}

void Engine::abandon() {
  bool unfinished = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    unfinished = in_backward_;
    if (unfinished) remember_failure(ErrorKind::comm, "its backward raised before it ended");
  }
  if (unfinished) finish(/*abandoned=*/true);
}

void Engine::finish(bool abandoned) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;  // by a hook, in the middle of this backward
  }
  struct Reset {
    Engine& engine;
    ~Reset() {
      const std::lock_guard<std::mutex> lock(engine.mutex_);
      engine.reset_locked();
      engine.roll_.reset();
    }
  } reset{*this};

  size_t first_bucket = 0;
  while (true) {
    const Agreement agreement = complete();
    if (roll_ && roll_->over()) end_join();
    if (!in_lockstep_) return finish_alone(abandoned);
    if (first_bucket == 0) ++step_;
    if (!agreement.same_steps || agreement.failed) return raise_disagreement(agreement, abandoned);
    if (failure_) {  // it came after the agreement, so the other ranks go on without this one
      broken_ = failure_->second;
      announce_failure();
      throw PythonError(failure_->first, place() + ": " + failure_->second);
    }
    if (first_bucket == 0) take_stock(agreement.left_out);
    adopt_used(agreement, first_bucket);
    if (!agreement.late) break;
    // Some rank trains parameters that no bucket holds: plan them now and send them in this same step.
    first_bucket = buckets_.size();
    on_late_();
    late_ = false;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (first_bucket == buckets_.size()) break;  // they were frozen again before the backward
    next_ = first_bucket;
  }
  scale_to_active();
  share_arrival_order();
  executor_->recorder().end_step();
  if (const auto on_end = on_end_) on_end();  // a copy: it may take itself away
}

void Engine::finish_alone(bool abandoned) {
  ++step_;
  if (!failure_) take_stock(std::nullopt);
  if (abandoned) return;  // its error has been raised, and training may go on
  if (failure_) throw PythonError(failure_->first, place() + ": " + failure_->second);
  executor_->recorder().end_step();
  if (!late_) return;
  throw PythonError(
      ErrorKind::config,
      place() +
          ": a parameter has become trainable since the model was wrapped, which this algorithm "
          "cannot add to its plan; close() the wrapper and wrap the model again");
}

// Sends what is left of this backward and waits for all of it.
Agreement Engine::complete() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    fire_locked(/*everything=*/true);
  }
  try {
    executor_->wait([this] { look_around(); });
    return round_ ? round_->wait() : Agreement();
  } catch (const std::exception&) {
    fail_wait();
  }
}

// A parameter without a gradient here takes the reduced one if any rank had one; if none had, it keeps none. In rounds it
// takes the zeros, so that an optimizer treats it alike on all ranks whatever their graphs.
void Engine::adopt_used(const Agreement& agreement, size_t first_bucket) {
  for (size_t b = first_bucket; b < buckets_.size(); ++b) {
    const auto& bucket = *buckets_[b].bucket;
    if (!bucket.has("grad")) continue;  // each rank's gradients are its own
    for (size_t position = 0; position < bucket.indices().size(); ++position) {
      const at::Tensor& param = bucket.params()[position];
      const at::Tensor& view = bucket.views("grad")[position];
      const at::Tensor& grad = param.grad();
      const bool wanted = agreement.used[static_cast<size_t>(bucket.indices()[position])] ||
                          (passes_ && param.requires_grad());
      const bool
          elsewhere =  // a round may have been long over for the parameter when its gradient was replaced
          passes_ && grad.defined() && (grad.layout() != at::kStrided || grad.data_ptr() != view.data_ptr());
      if (wanted && (!grad.defined() || elsewhere)) param.mutable_grad() = view;
    }
  }
}

void Engine::raise_disagreement(const Agreement& agreement, bool abandoned) {
  std::string mine = std::to_string(optimizer_steps_.load());
  auto kind = ErrorKind::comm;
  if (failure_) {
    kind = failure_->first;
    mine = failure_->second;
  } else if (agreement.same_steps) {
    mine.clear();
  }
  const auto texts = gather_texts(*control_, mine);
  std::ostringstream message;
  message << place() << ": ";
  message << (agreement.same_steps ? "the gradients of this step are lost"
                                   : "the ranks have taken different numbers of optimizer steps");
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty()) message << "; rank " << rank << ": " << texts[rank];
  }
  if (!agreement.same_steps) broken_ = message.str();
  // The rank whose backward raised has had its error already, and its training may go on. So may that of the others, if
  // they catch theirs; a rank that shadows them has no loop that could.
  if ((abandoned || shadowing_) && agreement.same_steps) return;
  throw PythonError(kind, message.str());
}

void Engine::share_arrival_order() {
  if (order_shared_) return;
  if (roll_ && !roll_->absent().empty()) return;  // rank 0 may be one that saw no gradient arrive
  order_shared_ = true;
  std::vector<bool> seen(params_.size());
  std::vector<int64_t> order = arrival_;
  for (const int64_t index : order) seen[static_cast<size_t>(index)] = true;
  for (const auto& planned : buckets_) {
    for (const int64_t index : planned.bucket->indices()) {
      if (!seen[static_cast<size_t>(index)]) order.push_back(index);
    }
  }
  if (control_->size() > 1) {
    auto tensor = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
    std::copy(order.begin(), order.end(), tensor.data_ptr<int64_t>());
    control_->broadcast(tensor, 0)->wait();
    order.assign(tensor.data_ptr<int64_t>(), tensor.data_ptr<int64_t>() + tensor.numel());
  }
  on_order_(std::move(order));
}

}  // namespace gossamer
