// See on_device.h. Device-generic: c10's guard interface stands for CUDA, so no CUDA header is needed.
#include "encoded/on_device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "backend/gil.h"
#include "backend/work.h"
#include "comm/record_use.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr auto kPoll = std::chrono::microseconds(200);

// An operation that has been queued on a stream, as far as `end`.
class QueuedWork : public c10d::Work {
 public:
  QueuedWork(int rank, const OnDevice::Call& call, at::Device device, c10::Event end)
      : Work(rank, call.type, call.title, call.inputs),
        device_(device),
        end_(std::move(end)),
        outputs_(call.outputs),
        future_(new_future(outputs_, {device})) {
    finish();  // for a profiler; the queueing is over
    complete(*future_, outputs_);
  }

  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { end_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_)); }
  void blockCurrentStream() override { synchronize(); }
  // The host waits only if it is given a limit.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout == kNoTimeout) return true;
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!isCompleted()) {
      if (std::chrono::steady_clock::now() > deadline) {
        raise_python(ErrorKind::comm, c10d::opTypeToString(opType_), ": not complete after ", timeout.count(),
                     " ms of waiting; the operation goes on");
      }
      std::this_thread::sleep_for(kPoll);
    }
    return true;
  }
  std::vector<at::Tensor> result() override { return all_of(outputs_); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  at::Device device_;
  c10::Event end_;
  Outputs outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The tensors as one that is flat: in place if they lie one after the other, else undefined.
at::Tensor in_place(const std::vector<at::Tensor>& parts) {
  const at::Tensor& first = parts[0];
  int64_t numel = 0;
  for (const auto& part : parts) {
    const bool next = part.storage().is_alias_of(first.storage()) &&
                      part.storage_offset() == first.storage_offset() + numel;
    if (!next || !part.is_contiguous()) return {};
    numel += part.numel();
  }
  return first.as_strided({numel}, {1});
}

void copy_parts(const at::Tensor& flat, const std::vector<at::Tensor>& parts, bool out_of_flat) {
  int64_t begin = 0;
  for (const auto& part : parts) {
    const at::Tensor there = flat.narrow(0, begin, part.numel()).view(part.sizes());
    out_of_flat ? at::Tensor(part).copy_(there) : there.copy_(part);
    begin += part.numel();
  }
}

int64_t numel_of(const std::vector<at::Tensor>& parts) {
  int64_t numel = 0;
  for (const auto& part : parts) numel += part.numel();
  return numel;
}

at::Tensor flat_copy(const std::vector<at::Tensor>& parts) {
  at::Tensor flat = at::empty({numel_of(parts)}, parts[0].options());
  copy_parts(flat, parts, /*out_of_flat=*/false);
  return flat;
}

// Of PREMUL_SUM; each rank has its own factor, which may be on the device.
void premultiply(const at::Tensor& x, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
  const auto& supplement = supplement_of(op);
  if (supplement.tensor_factor.defined()) {
    at::Tensor(x).mul_(supplement.tensor_factor);
  } else {
    at::Tensor(x).mul_(supplement.double_factor);
  }
}

}  // namespace

OnDevice::OnDevice(CommunicatorPtr comm, CodecOptions options)
    : comm_(std::move(comm)),
      options_(std::move(options)),
      device_(comm_->device()),
      stream_(c10::impl::VirtualGuardImpl(device_.type())
                  .getStreamFromGlobalPool(device_, /*isHighPriority=*/true)) {}

OnDevice::Reply OnDevice::run(const Call& call, const std::function<void()>& queue) {
  const WithoutGil without_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const c10::Stream caller = guard.getStream(device_);
  {
    c10::Event ready(device_.type());
    ready.record(caller);
    ready.block(stream_);
  }
  Reply work;
  c10::Event end(device_.type());
  {
    const c10::StreamGuard on_stream(stream_);
    const at::AutoDispatchBelowADInplaceOrView below;
    if (call.async) {  // the caller may drop a tensor before the stream is so far
      for (const auto& x : call.inputs) record_use_on_current_stream(x);
      for (const auto& list : call.outputs)
        for (const auto& x : list) record_use_on_current_stream(x);
    }
    try {
      queue();
    } catch (...) {
      end.record(stream_);
      end.block(caller);  // what has been queued may use the caller's tensors
      throw;
    }
    end.record(stream_);
    if (call.async) return c10::make_intrusive<QueuedWork>(comm_->rank(), call, device_, std::move(end));
  }
  end.block(caller);
  return {};
}

double OnDevice::scale_of(const c10d::ReduceOp& op) const {
  return op.op_ == c10d::ReduceOp::AVG ? 1.0 / comm_->size() : 1.0;
}

void OnDevice::all_reduce(const at::Tensor& x, const c10d::ReduceOp& op) {
  const bool flat = x.is_contiguous();
  const at::Tensor sum = flat ? in_place({x}) : flat_copy({x});
  premultiply(sum, op);
  two_shot::all_reduce(*comm_, *options_.codec, sum, scale_of(op), scratch_, calls_++);
  if (!flat) copy_parts(sum, {x}, /*out_of_flat=*/true);
}

void OnDevice::reduce_scatter(const at::Tensor& out, const Tensors& parts, const c10d::ReduceOp& op) {
  at::Tensor whole = in_place(parts);
  if (!whole.defined() || op.op_ == c10d::ReduceOp::PREMUL_SUM) whole = flat_copy(parts);
  premultiply(whole, op);
  const bool flat = out.is_contiguous();
  const at::Tensor part = flat ? in_place({out}) : at::empty({out.numel()}, out.options());
  two_shot::reduce_scatter(*comm_, *options_.codec, part, whole, scale_of(op), scratch_, calls_++);
  if (!flat) copy_parts(part, {out}, /*out_of_flat=*/true);
}

void OnDevice::all_gather(const Tensors& outs, const at::Tensor& x) {
  at::Tensor whole = in_place(outs);
  const bool flat = whole.defined();
  if (!flat) whole = at::empty({numel_of(outs)}, x.options());
  const at::Tensor part = x.is_contiguous() ? in_place({x}) : flat_copy({x});
  two_shot::all_gather(*comm_, *options_.gather_codec, whole, part, scratch_, calls_++);
  if (!flat) copy_parts(whole, outs, /*out_of_flat=*/true);
}

}  // namespace gossamer
