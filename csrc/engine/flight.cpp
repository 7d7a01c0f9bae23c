// See flight.h.
#include "engine/flight.h"

#include <ATen/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/record_use.h"
#include "engine/ending/ending.h"

namespace gossamer {
namespace {

constexpr size_t kLanes = 2;

}  // namespace

Flight::Flight(Worker& worker, std::mutex& mutex) : worker_(worker), mutex_(mutex) {
  const auto device = worker.comm().device();
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  gather_stream_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  if (!worker.comm().overlaps_sums()) return;
  while (lanes_.size() < kLanes)
    lanes_.push_back(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true));
}

void Flight::clear() {
  plan_.clear();
  kept_.clear();
  before_.clear();
}

void Flight::append(const std::shared_ptr<Bucket>& bucket, std::shared_ptr<BucketWork> work) {
  bucket->adopt_gradients();
  plan_.push_back({bucket, std::move(work)});
}

void Flight::reset(const std::vector<int64_t>& awaited) {
  progress_.clear();
  for (const int64_t gradients : awaited) progress_.push_back({gradients, {}});
  next_ = 0;
  has_sent_ = false;
  has_begun_.clear();
}

double Flight::gather_scale(const BucketWork& work) const {
  return redo_ ? 1.0 : work.gather_scale(worker_.comm());
}

void Flight::gradient_complete(size_t number, size_t position, Ending& ending) {
  const auto& [bucket, work] = plan_[number];
  if (worker_.comm().device().is_cpu()) bucket->take(position, gather_scale(*work));
  if (observe::tracing()) {  // its name is made only then
    observe::instant("gradient " + bucket->names()[position], bucket->index(), worker_.step());
  }
  Progress& progress = progress_[number];
  record_event(progress);
  if (--progress.pending == 0) fire(ending, /*everything=*/false);
}

// One event for each bucket and producing stream; recording again replaces the earlier one.
void Flight::record_event(Progress& progress) {
  const auto side = worker_.executor().side_stream();
  if (!side) return;
  const c10::impl::VirtualGuardImpl guard(side->device_type());
  const auto stream = guard.getStream(side->device());
  for (auto& [known, event] : progress.events) {
    if (known == stream) return event.record(stream);
  }
  progress.events.emplace_back(stream, c10::Event(side->device_type()));
  progress.events.back().second.record(stream);
}

// Sends the buckets that are complete; with `everything`, all that are left.
void Flight::fire(Ending& ending, bool everything) {
  while (next_ < plan_.size() && (everything || progress_[next_].pending == 0)) {
    const bool last = next_ + 1 == plan_.size();
    if (last) ending.before_last_bucket();
    // A bucket without a gradient in this backward still follows what the caller's stream did to its memory.
    if (everything || progress_[next_].events.empty()) record_event(progress_[next_]);
    submit(next_++);
    if (last) ending.after_last_bucket();
  }
}

void Flight::submit(size_t bucket) {
  const Planned& planned = plan_[bucket];
  const auto sent = std::make_shared<Sent>(
      Sent{planned, bucket, !std::exchange(has_sent_, true), std::move(progress_[bucket].events)});
  observe::instant("bucket queued", planned.bucket->index(), worker_.step(), planned.bucket->bytes());
  const auto task = [this, sent] {
    worker_.run_guarded(sent->planned.bucket->describe(), [&] { run(*sent); });
  };
  last_sent_ = worker_.executor().submit(task, "bucket", planned.bucket->index());
}

std::optional<c10::Stream> Flight::lane_of(const Sent& sent) const {
  if (lanes_.empty() || !sent.planned.work->overlaps() || !worker_.comm().overlaps_sums()) return {};
  return lanes_[sent.number % lanes_.size()];
}

void Flight::gather(Sent& sent, const std::optional<c10::Stream>& lane) {
  const auto& planned = sent.planned;
  const observe::Span span("gather", "memory", planned.bucket->bytes());
  if (!gather_stream_) return planned.bucket->gather(gather_scale(*planned.work));
  c10::Event gathered(gather_stream_->device_type());
  {
    const c10::StreamGuard guard(*gather_stream_);
    for (auto& [stream, event] : sent.events) event.block(*gather_stream_);
    planned.bucket->gather(gather_scale(*planned.work));
    gathered.record(*gather_stream_);
  }
  const c10::Stream side = *worker_.executor().side_stream();
  const bool forks = sent.first && !lanes_.empty();
  if (!lane || forks) gathered.block(side);
  if (forks) before_lanes_.emplace(side.device_type()).record(side);
  if (!lane) return;
  if (!forks) gathered.block(*lane);  // else by way of the side stream
  before_lanes_->block(*lane);
}

void Flight::run(Sent& sent) {
  const auto& planned = sent.planned;
  planned.bucket->set_step(worker_.step());
  observe::context().step = worker_.step();
  const auto lane = lane_of(sent);
  gather(sent, lane);
  c10::OptionalStreamGuard on_lane;
  if (lane) on_lane.reset_stream(*lane);
  if (redo_) {
    keep_before(*planned.bucket);
    if (planned.bucket->has("grad"))
      planned.bucket->rescale("grad", planned.work->gather_scale(worker_.comm()));
  }
  weigh(*planned.bucket);
  if (keeps_gradients_) keep(*planned.bucket);
  planned.work->run(worker_.comm(), planned.bucket);
  if (lane) {
    c10::Event done(lane->device_type());
    done.record(*lane);
    done.block(*worker_.executor().side_stream());
  }
  if (!redo_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  before_[planned.bucket->index()].done = true;
}

// Not part of the gather, because the worker learns the weight while gradients are taken.
void Flight::weigh(const Bucket& bucket) const {
  const double weight = weight_();
  if (weight == 1.0 || !bucket.has("grad")) return;
  const c10::OptionalDeviceGuard guard(bucket.device());
  // Without samples a loss may be NaN, which 0 would not hide.
  if (weight == 0.0) bucket.flat("grad").zero_();
  if (weight != 0.0) bucket.flat("grad").mul_(weight);
}

void Flight::keep_gradients(bool keep) {
  const std::lock_guard<std::mutex> lock(mutex_);
  keeps_gradients_ = keep;
  if (!keep) kept_.clear();
}

std::map<int64_t, at::Tensor> Flight::kept_gradients() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [index, kept] : kept_) record_use_on_current_stream(kept);
  return kept_;
}

void Flight::keep_for_redo(bool keep) {
  const std::lock_guard<std::mutex> lock(mutex_);
  redo_ = keep;
  if (!keep) before_.clear();
}

std::map<int64_t, Flight::Before> Flight::before() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<int64_t, Before> begun;
  for (const auto& [index, before] : before_) {
    if (has_begun_.count(index) == 0) continue;
    begun[index] = before;
    for (const auto& [field, copy] : before.fields) record_use_on_current_stream(copy);
  }
  return begun;
}

void Flight::keep_before(const Bucket& bucket) {
  std::map<std::string, at::Tensor> fields;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    fields = before_[bucket.index()].fields;
  }
  for (const auto& name : bucket.fields()) {
    at::Tensor& copy = fields[name];
    const at::Tensor flat = bucket.flat(name);
    if (!copy.defined()) copy = at::empty_like(flat);
    copy.copy_(flat);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  before_[bucket.index()] = {fields, /*done=*/false};
  has_begun_[bucket.index()] = true;
}

void Flight::keep(const Bucket& bucket) {
  if (!bucket.has("grad")) return;
  const at::Tensor copy = bucket.flat("grad").clone();
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_[bucket.index()] = copy;
}

}  // namespace gossamer
