// CUDA graphs: what a captured step may be. Events, kernels and collectives of a capturable group go into the graph from
// whatever thread they are queued, the worker's too, because its side stream joins the capture by the first event. What
// the host does is done at capture alone: hooks, counters, the agreement. The rest of Engine is in engine.cpp.
#include <torch/csrc/autograd/function.h>

#include "device_kernels.h"
#include "engine/engine.h"

namespace gossamer {

std::string Engine::capture_refusal() const {
  if (const auto reason = comm_->capture_refusal(); !reason.empty()) return reason;
  for (const auto& planned : buckets_) {
    if (const auto reason = planned.work->capture_refusal(); !reason.empty()) return reason;
  }
  if (on_end_) return "autotune is still measuring";
  if (join_) return "it is in join(), where the ranks tell each other before each step who has input";
  if (late_) return "a parameter has become trainable, and its bucket is made in the next step";
  if (!order_shared_) {
    return "no synchronised backward has ended yet, and the first one makes the buckets anew; run some steps "
           "before";
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].bucket < 0 || slots_[i].node == nullptr) continue;
    // autograd hands gradients over on the stream that was current when the hook was made. The legacy default stream
    // cannot be part of a capture.
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(params_[i]);
    const auto stream = accumulator ? accumulator->stream() : std::nullopt;
    if (stream && stream->id() == 0) {
      return "parameter '" + names_[i] +
             "' was wrapped on the default stream, which no graph can hold; wrap the model under "
             "torch.cuda.stream(...), and run the steps before the capture there too";
    }
  }
  return "";
}

void Engine::check_capture() const {
  if (comm_->device().is_cpu() || !device_kernels(comm_->device().type()).is_capturing()) return;
  const auto reason = capture_refusal();
  if (reason.empty()) return;
  throw PythonError(ErrorKind::config, place() + ": a CUDA graph cannot capture this step: " + reason);
}

}  // namespace gossamer
