// See work.h.
#include "engine/work.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <limits>
#include <utility>

#include "comm/record_use.h"
#include "errors.h"

namespace gossamer {

void NativeAllReduce::run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) {
  if (comm.size() > 1) two_shot::all_reduce(comm, bucket->flat("grad"), scratch_);
}

void ScaledAllReduce::run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) {
  if (comm.size() > 1) two_shot::all_reduce(comm, bucket->flat("grad"), scratch_);
  if (postscale_ == 1.0) return;
  const c10::OptionalDeviceGuard guard(bucket->device());
  bucket->flat("grad").mul_(postscale_);
}

void CodecAllReduce::run_around(Communicator& comm, const std::shared_ptr<Bucket>& bucket,
                                const Around& around) {
  const at::Tensor grad = bucket->flat("grad");
  at::Tensor error;
  if (bucket->has("error")) error = bucket->flat("error");
  if (error.defined()) bucket->clear_padding("error");
  // Any number that differs from bucket to bucket and from step to step.
  const uint64_t nonce =
      codec::make_key(0, static_cast<uint64_t>(bucket->step()), 0, static_cast<uint64_t>(bucket->index()));
  const double scale = average_ ? 1.0 / comm.size() : 1.0;
  if (error.defined()) {
    const auto aside = bucket->set_aside("error");
    two_shot::all_reduce_with_error(comm, codec_, grad, scale, scratch_, nonce, error, around);
    for (const auto& [view, kept] : aside) view.add_(kept);
  } else {
    two_shot::all_reduce(comm, codec_, grad, scale, scratch_, nonce, around);
  }
}

void TimedWork::run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) {
  const at::Device device = bucket->device();
  if (device.is_cpu()) {
    const auto begin = std::chrono::steady_clock::now();
    work_->run(comm, bucket);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    const std::lock_guard<std::mutex> lock(mutex_);
    seconds_.push_back(taken.count());
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto event = [&] { return c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT); };
  Events events(event(), event());
  events.first.record(guard.getStream(device));
  work_->run(comm, bucket);
  events.second.record(guard.getStream(device));
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(std::move(events));
}

std::vector<double> TimedWork::take_seconds() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [begin, end] : events_) {
    end.synchronize();
    seconds_.push_back(begin.elapsedTime(end) / 1000.0);  // milliseconds
  }
  events_.clear();
  return std::exchange(seconds_, {});
}

void AgreeOnFinite::run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) {
  const c10::OptionalDeviceGuard guard(bucket->device());
  if (comm.size() == 1) return;
  at::Tensor smallest;
  std::vector<at::Tensor> extremes;  // a NaN wins in aminmax
  for (const auto& param : bucket->params()) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined() || grad.layout() != at::kStrided || grad.numel() == 0) continue;
    record_use_on_current_stream(grad);
    const auto [low, high] = at::aminmax(grad.detach());
    extremes.push_back(low);
    extremes.push_back(high);
    if (!smallest.defined() || grad.numel() < smallest.numel()) smallest = grad.detach();
  }
  at::Tensor bad = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(bucket->device()));
  if (!extremes.empty()) bad.fill_(at::isfinite(at::stack(extremes)).all().logical_not().to(at::kFloat));
  comm.all_reduce(bad, ReduceOp::max)->wait();
  if (!smallest.defined()) return;
  // The value is not read on the host, which would make it wait for the device.
  smallest.copy_(at::where(bad.gt(0).squeeze(), std::numeric_limits<double>::quiet_NaN(), smallest));
}

}  // namespace gossamer
