// See lockstep.h.
#include "engine/ending/lockstep.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <string>

#include "engine/ending/join.h"

namespace gossamer {
namespace {

// Bytes are reduced with MAX, so one comparison shows "any rank". MAX over (steps mod m) plus MAX over (m - 1 - steps
// mod m) is m - 1 only if all ranks sent the same.
constexpr int64_t kStepModulus = 251;
enum Field : int64_t { kStep, kStepComplement, kFailed, kLate, kLeftOut, kWish, kUsed };
constexpr int64_t kTextBytes = 1000;
constexpr auto kAgreement = "agreement";  // the task's name for observers

// Every rank's text, for the error that all ranks raise; empty for a rank without one. Cut at kTextBytes.
std::vector<std::string> gather_texts(Communicator& control, const std::string& text) {
  const auto mine = at::zeros({kTextBytes}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), std::min<size_t>(text.size(), kTextBytes - 1));
  auto all = at::empty({control.size() * kTextBytes}, at::kByte);
  if (control.size() > 1) {
    control.all_gather(all, mine)->wait();
  } else {
    all = mine;
  }
  std::vector<std::string> texts;
  for (int rank = 0; rank < control.size(); ++rank) {
    texts.emplace_back(reinterpret_cast<const char*>(all.data_ptr<uint8_t>() + rank * kTextBytes));
  }
  return texts;
}

}  // namespace

struct Agreement {
  bool same_steps = true;
  bool failed = false;
  bool late = false;       // some rank has parameters that the plan lacks
  bool left_out = false;   // some rank has left out a parameter
  bool wished = false;     // some rank wishes for something
  std::vector<bool> used;  // by parameter index: some rank has a gradient
};

// What the ranks tell each other: one small all-reduce of bytes.
class Vote {
 public:
  // `steps`: a number of this rank's that must be that of the others; nullopt on a rank that shadows, whose number is
  // not compared.
  Vote(Communicator& control, std::optional<int64_t> steps, bool failed, bool late, bool left_out, bool wish,
       const std::vector<bool>& used)
      : control_(control), message_(at::zeros({kUsed + static_cast<int64_t>(used.size())}, at::kByte)) {
    auto* bytes = message_.data_ptr<uint8_t>();
    if (steps) {  // otherwise zeros, which no maximum shows
      bytes[kStep] = static_cast<uint8_t>(*steps % kStepModulus);
      bytes[kStepComplement] = static_cast<uint8_t>(kStepModulus - 1 - *steps % kStepModulus);
    }
    bytes[kFailed] = failed;
    bytes[kLate] = late;
    bytes[kLeftOut] = left_out;
    bytes[kWish] = wish;
    for (size_t i = 0; i < used.size(); ++i) bytes[kUsed + i] = used[i];
  }

  void start() {
    if (control_.size() > 1) pending_ = control_.all_reduce(message_, ReduceOp::max);
  }

  Agreement wait() {  // after start()
    if (pending_) pending_->wait();
    const auto* bytes = message_.data_ptr<uint8_t>();
    Agreement result;
    result.same_steps = bytes[kStep] + bytes[kStepComplement] == kStepModulus - 1;
    result.failed = bytes[kFailed] != 0;
    result.late = bytes[kLate] != 0;
    result.left_out = bytes[kLeftOut] != 0;
    result.wished = bytes[kWish] != 0;
    for (int64_t i = kUsed; i < message_.numel(); ++i) result.used.push_back(bytes[i] != 0);
    return result;
  }

 private:
  Communicator& control_;
  at::Tensor message_;
  PendingPtr pending_;
};

Lockstep::Lockstep(const Parts& parts, std::function<void()> on_late,
                   std::function<void(std::vector<int64_t>)> on_order)
    : Ending(parts), on_late_(std::move(on_late)), on_order_(std::move(on_order)) {}

void Lockstep::count_frozen(int graph_task) {
  if (graph_task != last_frozen_) ++frozen_;
  last_frozen_ = graph_task;
}

void Lockstep::reset() {
  vote_.reset();
  used_.reset();
}

// When the last bucket goes, all gradients are accounted for, and the bucket's flight hides the agreement's. On a device the
// hook waits for the bucket to be queued (see Worker::keep_order), and must not wait for other ranks: so the agreement, which
// blocks in some groups, begins after it.
void Lockstep::before_last_bucket() {
  make_vote(used_ ? *used_ : parts_.hooks.used());
  if (!parts_.worker.comm().queues_on_device()) submit_vote();
}

// The worker waits for it too: the caller's wait can be interrupted, this operation cannot.
void Lockstep::after_last_bucket() {
  if (parts_.worker.comm().queues_on_device()) submit_vote();
  parts_.worker.executor().submit([vote = vote_] { vote->wait(); }, kAgreement);
}

void Lockstep::make_vote(const std::vector<bool>& used) {
  const bool shadowing = parts_.join.shadowing();
  const auto steps = shadowing ? std::nullopt : std::optional<int64_t>(optimizer_steps_ + frozen_);
  const bool left_out = !shadowing && !parts_.hooks.unreached().empty();
  vote_ = std::make_shared<Vote>(parts_.worker.control(), steps, parts_.hooks.failure().has_value(),
                                 parts_.hooks.late(), left_out, wish_, used);
}

void Lockstep::submit_vote() {
  parts_.worker.executor().submit([vote = vote_] { vote->start(); }, kAgreement);
}

// Sends what is left of this backward and waits for all of it.
Agreement Lockstep::complete() {
  {
    const std::lock_guard<std::mutex> lock(parts_.mutex);
    // Read before anything is submitted: from then on the worker owns the gradients of that bucket.
    used_ = parts_.hooks.used();
    parts_.flight.fire_rest(*this);
    if (!vote_) {  // a plan without buckets, after a failed re-plan
      make_vote(*used_);
      submit_vote();
    }
  }
  Agreement agreement;
  parts_.worker.finish([&] { agreement = vote_->wait(); });
  parts_.join.settle();
  return agreement;
}

void Lockstep::end(bool abandoned, bool trained_too) {
  const auto on_lost = on_lost_;  // a copy: it replaces this engine
  if (!on_lost) return end_in_group(abandoned, trained_too);
  counted_ = disagreed_ = false;
  const int64_t step = parts_.worker.step();
  const auto ended_otherwise = [&](const std::string& why) {
    if (!counted_) parts_.worker.set_step(step);
    return !disagreed_ && on_lost(counted_, why);
  };
  try {
    return end_in_group(abandoned, trained_too);
  } catch (const RaisedError& error) {
    if (error.kind != ErrorKind::comm || !ended_otherwise(error.message)) throw;
  } catch (const std::exception& error) {  // Python's too
    if (!ended_otherwise(error.what())) throw;
  }
}

void Lockstep::end_in_group(bool abandoned, bool trained_too) {
  Worker& worker = parts_.worker;
  Hooks& hooks = parts_.hooks;
  const auto& plan = parts_.flight.plan();
  size_t first_bucket = 0;
  while (true) {
    const Agreement agreement = complete();
    if (first_bucket == 0) worker.set_step(worker.step() + 1);
    wished_ = agreement.wished;
    if (!agreement.same_steps || agreement.failed) {
      disagreed_ = true;
      return raise_disagreement(agreement, abandoned);
    }
    // This failure came after the agreement, so the other ranks go on without this one.
    if (const auto& failure = hooks.failure()) {
      disagreed_ = true;
      worker.break_off(failure->second);
      worker.announce_failure();
      raise_python(failure->first, worker.place() + ": " + failure->second);
    }
    if (first_bucket == 0) {
      const std::lock_guard<std::mutex> lock(parts_.mutex);
      hooks.take_stock(!parts_.join.shadowing(), agreement.left_out);
    }
    for (size_t i = first_bucket; i < plan.size(); ++i) adopt(*plan[i].bucket, agreement.used, trained_too);
    if (!agreement.late) break;
    // Some rank trains parameters that no bucket holds: plan them now, and send them in this same step.
    first_bucket = plan.size();
    on_late_();
    hooks.set_late(false);
    const std::lock_guard<std::mutex> lock(parts_.mutex);
    if (first_bucket == plan.size()) break;  // they were frozen again before the backward
    parts_.flight.go_on_from(first_bucket);
  }
  counted_ = true;
  scale_to_active();
  share_order();
  worker.executor().recorder().end_step();
  if (const auto on_end = on_end_) on_end();  // a copy: it may remove itself
}

// A parameter without a gradient on this rank takes the reduced one if any rank had one, and stays without one otherwise.
// With `trained_too`, a trained parameter takes the zeros, so that optimizers on all ranks treat it alike.
void Lockstep::adopt(const Bucket& bucket, const std::vector<bool>& used, bool trained_too) {
  if (!bucket.has("grad")) return;  // each rank's gradients are its own
  for (size_t position = 0; position < bucket.indices().size(); ++position) {
    const at::Tensor& param = bucket.params()[position];
    const at::Tensor& view = bucket.views("grad")[position];
    const at::Tensor& grad = param.grad();
    const bool wanted =
        used[static_cast<size_t>(bucket.indices()[position])] || (trained_too && param.requires_grad());
    // The gradient may have been replaced long after the parameter's round was over.
    const bool elsewhere = trained_too && grad.defined() &&
                           (grad.layout() != at::kStrided || grad.data_ptr() != view.data_ptr());
    if (wanted && (!grad.defined() || elsewhere)) bucket.give_gradient(position);
  }
}

// Replaces the mean over all ranks, which the works computed, by the mean over the active ranks.
void Lockstep::scale_to_active() {
  const double scale = parts_.join.scale();
  if (scale == 1.0) return;
  for (const auto& planned : parts_.flight.plan()) {
    if (!planned.bucket->has("grad")) continue;
    const c10::OptionalDeviceGuard guard(planned.bucket->device());
    planned.bucket->flat("grad").mul_(scale);
  }
}

void Lockstep::raise_disagreement(const Agreement& agreement, bool abandoned) {
  std::string mine = std::to_string(optimizer_steps_.load());
  if (frozen_ > 0) mine += " and " + std::to_string(frozen_) + " backwards while every parameter was frozen";
  auto kind = ErrorKind::comm;
  if (const auto& failure = parts_.hooks.failure()) {
    kind = failure->first;
    mine = failure->second;
  } else if (agreement.same_steps) {
    mine.clear();
  }
  const auto texts = gather_texts(parts_.worker.control(), mine);
  std::ostringstream message;
  message << parts_.worker.place() << ": ";
  message << (agreement.same_steps ? "the gradients of this step are lost"
                                   : "the ranks have taken different numbers of optimizer steps");
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty()) message << "; rank " << rank << ": " << texts[rank];
  }
  if (!agreement.same_steps) parts_.worker.break_off(message.str());
  // The rank whose backward raised already has its error, and its training may go on. So may that of the other ranks, if
  // they catch theirs; a rank that shadows them has no loop that could.
  if ((abandoned || parts_.join.shadowing()) && agreement.same_steps) return;
  raise_python(kind, message.str());
}

void Lockstep::share_order() {
  if (order_shared_ || !parts_.join.everyone()) return;  // rank 0 may have seen no gradient arrive
  order_shared_ = true;
  std::vector<int64_t> order = parts_.hooks.order();
  const std::set<int64_t> seen(order.begin(), order.end());
  for (const auto& planned : parts_.flight.plan()) {
    for (const int64_t index : planned.bucket->indices()) {
      if (seen.count(index) == 0) order.push_back(index);
    }
  }
  Communicator& control = parts_.worker.control();
  if (control.size() > 1) {
    auto tensor = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
    std::copy(order.begin(), order.end(), tensor.data_ptr<int64_t>());
    control.broadcast(tensor, 0)->wait();
    order.assign(tensor.data_ptr<int64_t>(), tensor.data_ptr<int64_t>() + tensor.numel());
  }
  on_order_(std::move(order));
}

}  // namespace gossamer
