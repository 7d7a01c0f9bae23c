// See work.h.
#include "engine/work.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
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
  // Of each parameter, because a GradScaler decides for each optimizer, which has some of them.
  const at::Tensor zero = at::zeros({}, at::TensorOptions().dtype(bucket->dtype()).device(bucket->device()));
  std::vector<at::Tensor> grads, extremes;  // a NaN wins in aminmax
  at::Tensor smallest;
  for (const auto& param : bucket->params()) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined() || grad.layout() != at::kStrided || grad.numel() == 0) {
      grads.emplace_back();
      extremes.insert(extremes.end(), 2, zero);
      continue;
    }
    record_use_on_current_stream(grad);
    const auto [low, high] = at::aminmax(grad.detach());
    extremes.push_back(low);
    extremes.push_back(high);
    grads.push_back(grad);
    if (!smallest.defined() || grad.numel() < smallest.numel()) smallest = grad;
  }
  at::Tensor bad = at::isfinite(at::stack(extremes)).view({-1, 2}).all(1).logical_not().to(at::kFloat);
  comm.all_reduce(bad, ReduceOp::max)->wait();
  if (!smallest.defined()) return;
  // On an accelerator the values are not read on the host, which would have to wait for the device.
  const float* known = bad.is_cpu() ? bad.const_data_ptr<float>() : nullptr;
  const auto marks = at::where(bad.gt(0), std::numeric_limits<float>::quiet_NaN(), at::zeros_like(bad));
  for (size_t i = 0; i < grads.size(); ++i) {
    if (known != nullptr && known[i] == 0) continue;
    // So that a rank without this gradient notices it too.
    const at::Tensor grad = (grads[i].defined() ? grads[i] : smallest).detach();
    grad.as_strided({}, {}, grad.storage_offset()).add_(marks.select(0, static_cast<int64_t>(i)));
  }
}

}  // namespace gossamer
