// The backend's sums. Arguments come as c10d gives them; they are checked and turned into pointers for shm/collectives.h,
// or for hosts.h where there are several hosts. Strided tensors go through a contiguous copy. See backend.h.
#include "backend/checks.h"
#include "backend/start.h"

namespace gossamer {

void GossamerBackend::agree(const shm::Call& call, shm::Deadline deadline) {
  hosts_ ? hosts_->agree(call, deadline) : shm::agree(*group_, call, deadline);
}

std::optional<CallAcross> GossamerBackend::enter(const shm::Call& call, shm::Deadline deadline) {
  if (hosts_) return hosts_->begin(call, deadline);
  shm::agree(*group_, call, deadline);
  return {};
}

void GossamerBackend::agree_on_count(size_t count, shm::Deadline deadline) {
  const auto number = static_cast<int64_t>(count);
  hosts_ ? hosts_->agree_on_count(number, deadline) : shm::agree_on_count(*group_, number, deadline);
}

void GossamerBackend::all_reduce(const Flat& flat, const shm::Summing& summing, shm::Deadline deadline) {
  if (hosts_) {
    hosts_->all_reduce(flat.data(), flat.numel(), summing, deadline);
  } else {
    std::shared_ptr<shm::Shared> keep;
    std::vector<void*> peers;
    const auto window = windows_.find(flat.data(), flat.bytes(), keep, peers);
    shm::all_reduce(*group_, flat.data(), flat.numel(), summing, window.id ? &window : nullptr, deadline);
  }
}

GossamerBackend::Reply GossamerBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (auto* other = elsewhere(tensors)) return other->allreduce(tensors, options);
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) return allreduce_sparse(tensors, options);
  const Plan plan{c10d::OpType::ALLREDUCE, "gossamer:all_reduce", options.timeout, options.asyncOp};
  shm::Summing summing;
  Flat flat = checked(plan, [&] {
    const auto& tensor = only("all_reduce", tensors);
    require_disjoint("all_reduce", tensor);
    summing = to_shm(options.reduceOp, tensor.scalar_type(), getSize(), "all_reduce");
    return Flat(tensor, plan.async);
  });
  return start(plan, tensors, {tensors},
               [this, flat = std::move(flat), summing](shm::Deadline deadline) mutable {
                 all_reduce(flat, summing, deadline);
                 flat.write_back();
               });
}

GossamerBackend::Reply GossamerBackend::allreduce_sparse(Tensors& tensors,
                                                         const c10d::AllreduceOptions& options) {
  if (auto* other = elsewhere(tensors)) return other->allreduce_sparse(tensors, options);
  const Plan plan{c10d::OpType::_ALLREDUCE_SPARSE, "gossamer:sparse_all_reduce", options.timeout,
                  options.asyncOp};
  return start(plan, tensors, {tensors},
               [this, tensors, gloos = c10d::AllreduceOptions(options)](shm::Deadline deadline) mutable {
                 const auto left =
                     std::chrono::duration_cast<std::chrono::milliseconds>(deadline - shm::Clock::now());
                 gloos.timeout = std::max(left, std::chrono::milliseconds(1));
                 gloo()->allreduce(tensors, gloos)->wait();
               });
}

GossamerBackend::Reply GossamerBackend::allreduce_coalesced(Tensors& tensors,
                                                            const c10d::AllreduceCoalescedOptions& options) {
  if (auto* other = elsewhere(tensors)) return other->allreduce_coalesced(tensors, options);
  const Plan plan{c10d::OpType::ALLREDUCE_COALESCED, "gossamer:all_reduce_coalesced", options.timeout,
                  options.asyncOp};
  std::vector<shm::Summing> summings;
  auto flats = checked(plan, [&] {
    for (const auto& tensor : tensors) {
      require_cpu("all_reduce_coalesced", tensor);
      require_disjoint("all_reduce_coalesced", tensor);
      summings.push_back(to_shm(options.reduceOp, tensor.scalar_type(), getSize(), "all_reduce_coalesced"));
    }
    return flatten(tensors);
  });
  return start(plan, tensors, {tensors}, [this, flats, summings](shm::Deadline deadline) mutable {
    agree_on_count(flats.size(), deadline);
    for (size_t i = 0; i < flats.size(); ++i) all_reduce(flats[i], summings[i], deadline);
    write_back(flats);
  });
}

GossamerBackend::Reply GossamerBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (auto* other = elsewhere(tensors)) return other->reduce(tensors, options);
  const Plan plan{c10d::OpType::REDUCE, "gossamer:reduce", options.timeout, options.asyncOp};
  const int root = static_cast<int>(options.rootRank);
  shm::Summing summing;
  Flat flat = checked(plan, [&] {
    const auto& tensor = only("reduce", tensors);
    require_root("reduce", options.rootRank, getSize());
    if (getRank() == root) require_disjoint("reduce", tensor);
    summing = to_shm(options.reduceOp, tensor.scalar_type(), getSize(), "reduce");
    return Flat(tensor);
  });
  return start(plan, tensors, {tensors}, [this, flat, summing, root](shm::Deadline deadline) mutable {
    hosts_ ? hosts_->reduce(flat.data(), flat.numel(), summing, root, deadline)
           : shm::reduce(*group_, flat.data(), flat.data(), flat.numel(), summing, root, deadline);
    if (getRank() == root) flat.write_back();
  });
}

void GossamerBackend::reduce_scatter(const std::vector<void*>& ins, const Flat& out,
                                     const shm::Summing& summing, shm::Deadline deadline) {
  if (hosts_) {
    hosts_->reduce_scatter(ins.data(), out.data(), out.numel(), summing, deadline);
  } else {
    const std::vector<int64_t> counts(ins.size(), out.numel());
    shm::reduce_scatter(*group_, ins.data(), out.data(), counts.data(), summing, deadline);
  }
}

GossamerBackend::Reply GossamerBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  if (auto* other = elsewhere(outputs)) return other->reduce_scatter(outputs, inputs, options);
  const Plan plan{c10d::OpType::REDUCE_SCATTER, "gossamer:reduce_scatter", options.timeout, options.asyncOp};
  shm::Summing summing;
  std::vector<Flat> ins;
  Flat out = checked(plan, [&] {
    const auto& output = only("reduce_scatter", outputs);
    require_disjoint("reduce_scatter", output);
    check_argument(inputs.size() == 1, "reduce_scatter: one list of inputs, got ", inputs.size());
    require_parts("reduce_scatter", inputs[0], output, getSize());
    summing = to_shm(options.reduceOp, output.scalar_type(), getSize(), "reduce_scatter");
    ins = flatten(inputs[0]);
    return Flat(output);
  });
  return start(plan, inputs[0], {outputs}, [this, ins, out, summing](shm::Deadline deadline) mutable {
    reduce_scatter(pointers(ins), out, summing, deadline);
    out.write_back();
  });
}

GossamerBackend::Reply GossamerBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                             const c10d::ReduceScatterOptions& options) {
  if (auto* other = elsewhere(output)) return other->_reduce_scatter_base(output, input, options);
  const Plan plan{c10d::OpType::_REDUCE_SCATTER_BASE, "gossamer:reduce_scatter", options.timeout,
                  options.asyncOp};
  return reduce_wholes(plan, {output}, {input}, options.reduceOp);
}

GossamerBackend::Reply GossamerBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  if (auto* other = elsewhere(outputs))
    return other->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  const Plan plan{c10d::OpType::COALESCED, "gossamer:reduce_scatter_coalesced", options.timeout,
                  options.asyncOp};
  return reduce_wholes(plan, outputs, inputs, options.reduceOp);
}

GossamerBackend::Reply GossamerBackend::reduce_wholes(const Plan& plan, const Tensors& outputs,
                                                      const Tensors& inputs, const c10d::ReduceOp& op) {
  std::vector<shm::Summing> summings;
  std::vector<Flat> ins;
  auto outs = checked(plan, [&] {
    require_disjoint("reduce_scatter", outputs);
    check_argument(outputs.size() == inputs.size(), "reduce_scatter: as many outputs as inputs, got ",
                   outputs.size(), " and ", inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      require_whole("reduce_scatter", inputs[i], outputs[i], getSize());
      summings.push_back(to_shm(op, outputs[i].scalar_type(), getSize(), "reduce_scatter"));
    }
    ins = flatten(inputs);
    return flatten(outputs);
  });
  return start(plan, inputs, {outputs}, [this, ins, outs, summings](shm::Deadline deadline) mutable {
    if (ins.size() != 1) agree_on_count(ins.size(), deadline);
    for (size_t i = 0; i < ins.size(); ++i) {
      reduce_scatter(parts_of(ins[i], getSize()), outs[i], summings[i], deadline);
    }
    write_back(outs);
  });
}

}  // namespace gossamer
