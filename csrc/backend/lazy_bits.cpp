// Collectives of tensors that torch negates or conjugates lazily, such as z.conj().imag. torch's own fallback gives a backend
// plain copies of them, and drops the copies that were written: all_reduce of such a tensor changed nothing, over every
// backend. Here the results are copied back.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

#include "errors.h"

namespace gossamer {
namespace {

bool is_lazy(const at::Tensor& x) { return x.defined() && (x.is_neg() || x.is_conj()); }

// In each of these operations the first argument is what it writes.
void with_plain_tensors(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // by the operation, and its plain copy
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& argument = (*stack)[first + i];
    const auto plain = [&](const at::Tensor& x) {
      if (!is_lazy(x)) return x;
      const at::Tensor copy = x.resolve_conj().resolve_neg();
      if (i == 0) written.emplace_back(x, copy);
      return copy;
    };
    if (argument.isTensor()) argument = plain(argument.toTensor());
    if (!argument.isTensorList()) continue;
    auto tensors = argument.toTensorList().copy();
    for (size_t j = 0; j < tensors.size(); ++j) tensors[j] = plain(tensors[j]);
    argument = tensors;
  }
  op.callBoxed(stack);
  if (written.empty()) return;
  if (const auto work = stack->back().toCustomClass<c10d::Work>())
    work->wait();  // null: it was done when it was posted
  for (const auto& [lazy, copy] : written) lazy.copy_(copy);
}

// To wait in recv() could be to wait for a message that this rank answers.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  raise_python(ErrorKind::config, op.schema().name(),
               ": cannot receive into a tensor that torch negates or conjugates lazily, such as "
               "z.conj().imag; receive "
               "into a plain tensor");
}

constexpr const char* kWriting[] = {"allreduce_",
                                    "allreduce_coalesced_",
                                    "broadcast_",
                                    "reduce_",
                                    "_allgather_base_",
                                    "allgather_into_tensor_coalesced_",
                                    "_reduce_scatter_base_",
                                    "reduce_scatter_tensor_coalesced_",
                                    "alltoall_base_",
                                    "alltoall_",
                                    "scatter_"};

void implement(torch::Library& library) {
  for (const char* name : kWriting)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&with_plain_tensors>());
  for (const char* name : {"recv_", "recv_any_source_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(c10d, Negative, library) { implement(library); }
TORCH_LIBRARY_IMPL(c10d, Conjugate, library) { implement(library); }

}  // namespace
}  // namespace gossamer
