// What CodecBackend does with tensors of an accelerator: it chooses what is encoded, and hands the rest on. See backend.h.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

#include "backend/gil.h"
#include "backend/start.h"
#include "device_kernels.h"
#include "encoded/backend.h"
#include "float_dtype.h"

namespace gossamer {
namespace {

bool is_dense(const at::Tensor& x) { return x.layout() == at::kStrided && x.is_non_overlapping_and_dense(); }

bool is_sum(const c10d::ReduceOp& op) {
  return op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG ||
         op.op_ == c10d::ReduceOp::PREMUL_SUM;
}

// Of an operation with one tensor for all ranks or one a rank. What does not fit is refused by the other backend.
bool fits(const std::vector<at::Tensor>& whole, const at::Tensor& part, int size) {
  const int64_t count = static_cast<int64_t>(whole.size());
  return (count == 1 || count == size) && std::all_of(whole.begin(), whole.end(), [&](const at::Tensor& x) {
           return is_dense(x) && x.device() == part.device() && x.scalar_type() == part.scalar_type() &&
                  x.numel() * count == part.numel() * size;
         });
}

}  // namespace

bool CodecBackend::encodes(const std::optional<CodecChoice>& codec, const at::Tensor& x,
                           int64_t bytes) const {
  return codec && takes_elsewhere(x) && is_dense(x) && bytes >= options_->min_bytes && !is_of_complex(x) &&
         float_dtype(x.scalar_type());
}

bool CodecBackend::encodes(const c10d::ReduceOp& op, const at::Tensor& x) const {
  return is_sum(op) && encodes(options_->codec, x, static_cast<int64_t>(x.nbytes()));
}

bool CodecBackend::encodes(const c10d::ReduceOp& op, const Tensors& whole, const at::Tensor& part) const {
  return is_sum(op) && encodes(options_->codec, part, static_cast<int64_t>(part.nbytes()) * getSize()) &&
         fits(whole, part, getSize());
}

bool CodecBackend::gathers_encoded(const Tensors& whole, const at::Tensor& part) const {
  return encodes(options_->gather_codec, part, static_cast<int64_t>(part.nbytes()) * getSize()) &&
         fits(whole, part, getSize());
}

OnDevice& CodecBackend::on_device(at::Device device) {
  const WithoutGil without_gil;  // connect_ may want it, and another thread the mutex
  const std::lock_guard<std::mutex> lock(on_device_mutex_);
  require_usable();
  if (ended_) raise_python(ErrorKind::comm, "the group was shut down; make a new one");
  if (!on_device_) {
    Ranks own = ranks_;
    own.store = c10::make_intrusive<c10d::PrefixStore>("codec_on_device", ranks_.store);
    own.timeout = options_->timeout;
    on_device_ = std::make_unique<OnDevice>(connect_(own, *options_, device), *options_);
  }
  check_argument(on_device_->comm()->device() == device,
                 "gossamer backend: the encoded operations of this group use ", on_device_->comm()->device(),
                 ", got a tensor on ", device, "; one rank has one device");
  return *on_device_;
}

CommunicatorPtr CodecBackend::device_comm() {
  const std::lock_guard<std::mutex> lock(on_device_mutex_);
  return on_device_ ? on_device_->comm() : nullptr;
}

GossamerBackend::Reply CodecBackend::run_on_device(OnDevice::Call call, at::Device device, Step step) {
  if (coalesces()) {
    if (!postponed_)
      postponed_ = Postponed{{c10d::OpType::COALESCED, "gossamer:coalesced", true, {}, {{}}}, device, {}};
    auto& [all, where, steps] = *postponed_;
    all.inputs.insert(all.inputs.end(), call.inputs.begin(), call.inputs.end());
    for (const auto& list : call.outputs)
      all.outputs[0].insert(all.outputs[0].end(), list.begin(), list.end());
    steps.push_back(std::move(step));
    return {};
  }
  if (device_kernels(device.type()).is_capturing()) {
    raise_python(ErrorKind::config, call.title,
                 ": a CUDA graph cannot hold an encoded operation of a process group, whose memory outlives "
                 "the graph; capture the step of gs.DataParallel, or use a group without a codec");
  }
  OnDevice& there = on_device(device);
  try {
    return there.run(call, [&] { step(there); });
  } catch (...) {
    const auto error = python_error(call.title, std::current_exception());
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      announce(first_line(known.what()));  // nobody shall wait for this rank
      throw;
    }
  }
}

GossamerBackend::Reply CodecBackend::endCoalescing() {
  auto work = GossamerBackend::endCoalescing();
  if (!postponed_) return work;
  auto [call, device, steps] = *std::exchange(postponed_, std::nullopt);
  return run_on_device(std::move(call), device, [&, steps = std::move(steps)](OnDevice& there) {
    work->wait();
    for (const auto& step : steps) step(there);
  });
}

GossamerBackend::Reply CodecBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || !encodes(options.reduceOp, tensors[0]))
    return GossamerBackend::allreduce(tensors, options);
  const OnDevice::Call call{
      c10d::OpType::ALLREDUCE, "gossamer:all_reduce", options.asyncOp, tensors, {tensors}};
  return run_on_device(call, tensors[0].device(),
                       [x = tensors[0], op = options.reduceOp](OnDevice& there) { there.all_reduce(x, op); });
}

GossamerBackend::Reply CodecBackend::allreduce_coalesced(Tensors& tensors,
                                                         const c10d::AllreduceCoalescedOptions& options) {
  Tensors encoded, exact;
  for (const auto& x : tensors) (encodes(options.reduceOp, x) ? encoded : exact).push_back(x);
  if (encoded.empty()) return GossamerBackend::allreduce_coalesced(tensors, options);
  const OnDevice::Call call{c10d::OpType::ALLREDUCE_COALESCED,
                            "gossamer:all_reduce_coalesced",
                            options.asyncOp,
                            tensors,
                            {tensors}};
  c10d::AllreduceCoalescedOptions inner = options;
  inner.asyncOp = false;  // on the current stream, which is the group's own then
  return run_on_device(call, encoded[0].device(), [this, exact, encoded, inner](OnDevice& there) mutable {
    if (!exact.empty())
      if (const auto work = GossamerBackend::allreduce_coalesced(exact, inner)) work->wait();
    for (const auto& x : encoded) there.all_reduce(x, inner.reduceOp);
  });
}

GossamerBackend::Reply CodecBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  if (outputs.size() != 1 || inputs.size() != 1 || !encodes(options.reduceOp, inputs[0], outputs[0]))
    return GossamerBackend::reduce_scatter(outputs, inputs, options);
  const OnDevice::Call call{
      c10d::OpType::REDUCE_SCATTER, "gossamer:reduce_scatter", options.asyncOp, inputs[0], {outputs}};
  return run_on_device(call, outputs[0].device(),
                       [out = outputs[0], parts = inputs[0], op = options.reduceOp](OnDevice& there) {
                         there.reduce_scatter(out, parts, op);
                       });
}

GossamerBackend::Reply CodecBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::ReduceScatterOptions& options) {
  if (!encodes(options.reduceOp, {input}, output))
    return GossamerBackend::_reduce_scatter_base(output, input, options);
  const OnDevice::Call call{
      c10d::OpType::_REDUCE_SCATTER_BASE, "gossamer:reduce_scatter", options.asyncOp, {input}, {{output}}};
  return run_on_device(call, output.device(), [output, input, op = options.reduceOp](OnDevice& there) {
    there.reduce_scatter(output, {input}, op);
  });
}

// The operations i of a coalesced call that are encoded, and the tensors of the others.
template <class Encoded>
CodecBackend::Chosen CodecBackend::choose(const Tensors& outputs, const Tensors& inputs, Encoded&& encoded) {
  Chosen chosen;
  if (outputs.size() != inputs.size()) return chosen;  // refused by the other backend
  for (size_t i = 0; i < outputs.size(); ++i) {
    const bool ours = encoded(i);
    (ours ? chosen.outputs : chosen.exact_outputs).push_back(outputs[i]);
    (ours ? chosen.inputs : chosen.exact_inputs).push_back(inputs[i]);
  }
  return chosen;
}

GossamerBackend::Reply CodecBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const auto chosen =
      choose(outputs, inputs, [&](size_t i) { return encodes(options.reduceOp, {inputs[i]}, outputs[i]); });
  if (chosen.outputs.empty())
    return GossamerBackend::reduce_scatter_tensor_coalesced(outputs, inputs, options);
  const OnDevice::Call call{
      c10d::OpType::COALESCED, "gossamer:reduce_scatter_coalesced", options.asyncOp, inputs, {outputs}};
  c10d::ReduceScatterOptions inner = options;
  inner.asyncOp = false;
  return run_on_device(call, outputs[0].device(), [this, chosen, inner](OnDevice& there) {
    auto [outs, ins, exact_outs, exact_ins] = chosen;
    if (!exact_outs.empty())
      if (const auto work = GossamerBackend::reduce_scatter_tensor_coalesced(exact_outs, exact_ins, inner))
        work->wait();
    for (size_t i = 0; i < outs.size(); ++i) there.reduce_scatter(outs[i], {ins[i]}, inner.reduceOp);
  });
}

GossamerBackend::Reply CodecBackend::allgather(Lists& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) {
  if (outputs.size() != 1 || inputs.size() != 1 || !gathers_encoded(outputs[0], inputs[0]))
    return GossamerBackend::allgather(outputs, inputs, options);
  const OnDevice::Call call{c10d::OpType::ALLGATHER, "gossamer:all_gather", options.asyncOp, inputs, outputs};
  return run_on_device(call, inputs[0].device(),
                       [outs = outputs[0], x = inputs[0]](OnDevice& there) { there.all_gather(outs, x); });
}

GossamerBackend::Reply CodecBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::AllgatherOptions& options) {
  if (!gathers_encoded({output}, input)) return GossamerBackend::_allgather_base(output, input, options);
  const OnDevice::Call call{
      c10d::OpType::_ALLGATHER_BASE, "gossamer:all_gather", options.asyncOp, {input}, {{output}}};
  return run_on_device(call, input.device(),
                       [output, input](OnDevice& there) { there.all_gather({output}, input); });
}

GossamerBackend::Reply CodecBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                     const c10d::AllgatherOptions& options) {
  const auto chosen =
      choose(outputs, inputs, [&](size_t i) { return gathers_encoded({outputs[i]}, inputs[i]); });
  if (chosen.outputs.empty())
    return GossamerBackend::allgather_into_tensor_coalesced(outputs, inputs, options);
  const OnDevice::Call call{
      c10d::OpType::COALESCED, "gossamer:all_gather_coalesced", options.asyncOp, inputs, {outputs}};
  c10d::AllgatherOptions inner = options;
  inner.asyncOp = false;
  return run_on_device(call, outputs[0].device(), [this, chosen, inner](OnDevice& there) {
    auto [outs, ins, exact_outs, exact_ins] = chosen;
    if (!exact_outs.empty())
      if (const auto work = GossamerBackend::allgather_into_tensor_coalesced(exact_outs, exact_ins, inner))
        work->wait();
    for (size_t i = 0; i < outs.size(); ++i) there.all_gather({outs[i]}, ins[i]);
  });
}

void CodecBackend::abort() {
  if (const auto comm = device_comm()) comm->abort();
  GossamerBackend::abort();
}

void CodecBackend::shutdown() {
  std::unique_ptr<OnDevice> ended;
  {
    const std::lock_guard<std::mutex> lock(on_device_mutex_);
    ended_ = true;
    ended = std::move(on_device_);
  }
  ended.reset();  // its connections let what is in flight finish
  GossamerBackend::shutdown();
}

}  // namespace gossamer
