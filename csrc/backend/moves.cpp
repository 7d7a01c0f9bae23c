// The backend's operations that move tensors without summing them; arguments are handled as in reductions.cpp. See backend.h.
#include <algorithm>
#include <numeric>

#include "backend/checks.h"
#include "backend/start.h"

namespace gossamer {
namespace {

// The number of elements that go to each rank: by the splits of dimension 0, or in equal parts.
std::vector<int64_t> split_sizes(const char* where, const at::Tensor& tensor,
                                 const std::vector<int64_t>& splits, int size) {
  require_cpu(where, tensor);
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  if (splits.empty()) {
    check_argument(rows % size == 0, where, ": without split sizes, dimension 0 must be a multiple of ", size,
                   ", got ", rows);
    return std::vector<int64_t>(static_cast<size_t>(size), tensor.numel() / size);
  }
  const int64_t sum = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  check_argument(static_cast<int>(splits.size()) == size && sum == rows &&
                     *std::min_element(splits.begin(), splits.end()) >= 0,
                 where, ": ", size, " split sizes must sum to dimension 0, which is ", rows, ", got ",
                 splits.size(), " that sum to ", sum);
  std::vector<int64_t> sizes;
  for (const int64_t split : splits) sizes.push_back(rows == 0 ? 0 : split * (tensor.numel() / rows));
  return sizes;
}

// Pointers to consecutive parts of `flat`, and their bytes.
struct Parts {
  Parts(const Flat& flat, const std::vector<int64_t>& sizes) {
    int64_t offset = 0;
    for (const int64_t size : sizes) {
      bytes.push_back(size * static_cast<int64_t>(flat.tensor().element_size()));
      pointers.push_back(static_cast<uint8_t*>(flat.data()) + offset);
      offset += bytes.back();
    }
  }
  std::vector<void*> pointers;
  std::vector<int64_t> bytes;
};

}  // namespace

GossamerBackend::Reply GossamerBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (auto* other = elsewhere(tensors)) return other->broadcast(tensors, options);
  const Plan plan{c10d::OpType::BROADCAST, "gossamer:broadcast", options.timeout, options.asyncOp};
  const int root = static_cast<int>(options.rootRank);
  Flat flat = checked(plan, [&] {
    const auto& tensor = only("broadcast", tensors);
    require_root("broadcast", options.rootRank, getSize());
    if (getRank() != root) require_disjoint("broadcast", tensor);
    return Flat(tensor);
  });
  return start(plan, tensors, {tensors}, [this, flat, root](shm::Deadline deadline) mutable {
    hosts_ ? hosts_->broadcast(flat.data(), flat.bytes(), root, deadline)
           : shm::broadcast(*group_, flat.data(), flat.bytes(), root, deadline);
    if (getRank() != root) flat.write_back();
  });
}

void GossamerBackend::all_gather(const Flat& in, const std::vector<void*>& outs, shm::Deadline deadline) {
  gather_bytes(in.data(), outs, in.bytes(), deadline);
}

void GossamerBackend::gather_bytes(const void* in, const std::vector<void*>& outs, int64_t bytes,
                                   shm::Deadline deadline) {
  if (hosts_) return hosts_->all_gather(in, outs.data(), bytes, deadline);
  const std::vector<int64_t> equal(outs.size(), bytes);
  shm::all_gather(*group_, in, outs.data(), equal.data(), deadline);
}

GossamerBackend::Reply GossamerBackend::allgather(Lists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  if (auto* other = elsewhere(inputs)) return other->allgather(outputs, inputs, options);
  const Plan plan{c10d::OpType::ALLGATHER, "gossamer:all_gather", options.timeout, options.asyncOp};
  std::vector<Flat> outs;
  Flat in = checked(plan, [&] {
    const auto& input = only("all_gather", inputs);
    check_argument(outputs.size() == 1, "all_gather: one list of outputs, got ", outputs.size());
    require_parts("all_gather", outputs[0], input, getSize());
    require_disjoint("all_gather", outputs[0]);
    outs = flatten(outputs[0]);
    return Flat(input);
  });
  return start(plan, inputs, outputs, [this, in, outs](shm::Deadline deadline) mutable {
    all_gather(in, pointers(outs), deadline);
    write_back(outs);
  });
}

GossamerBackend::Reply GossamerBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& options) {
  if (auto* other = elsewhere(input)) return other->_allgather_base(output, input, options);
  Tensors outputs{output};
  Tensors inputs{input};
  return gather_wholes(
      {c10d::OpType::_ALLGATHER_BASE, "gossamer:all_gather", options.timeout, options.asyncOp}, outputs,
      inputs);
}

GossamerBackend::Reply GossamerBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (auto* other = elsewhere(inputs))
    return other->allgather_into_tensor_coalesced(outputs, inputs, options);
  return gather_wholes(
      {c10d::OpType::COALESCED, "gossamer:all_gather_coalesced", options.timeout, options.asyncOp}, outputs,
      inputs);
}

GossamerBackend::Reply GossamerBackend::gather_wholes(const Plan& plan, const Tensors& outputs,
                                                      const Tensors& inputs) {
  std::vector<Flat> ins;
  auto outs = checked(plan, [&] {
    require_disjoint("all_gather", outputs);
    check_argument(outputs.size() == inputs.size(), "all_gather: as many outputs as inputs, got ",
                   outputs.size(), " and ", inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) require_whole("all_gather", outputs[i], inputs[i], getSize());
    ins = flatten(inputs);
    return flatten(outputs);
  });
  return start(plan, inputs, {outputs}, [this, ins, outs](shm::Deadline deadline) mutable {
    if (ins.size() != 1) agree_on_count(ins.size(), deadline);
    for (size_t i = 0; i < ins.size(); ++i) all_gather(ins[i], parts_of(outs[i], getSize()), deadline);
    write_back(outs);
  });
}

GossamerBackend::Reply GossamerBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& options) {
  if (auto* other = elsewhere(inputs)) return other->allgather_coalesced(outputs, inputs, options);
  const Plan plan{c10d::OpType::ALLGATHER_COALESCED, "gossamer:all_gather_coalesced", options.timeout,
                  options.asyncOp};
  // outputs[rank][tensor] becomes outs[tensor][rank].
  std::vector<std::vector<Flat>> outs(inputs.size());
  auto ins = checked(plan, [&] {
    check_argument(static_cast<int>(outputs.size()) == getSize(), "all_gather_coalesced: one list a rank, ",
                   getSize(), " in all, got ", outputs.size());
    for (const auto& list : outputs) {
      check_argument(list.size() == inputs.size(), "all_gather_coalesced: each list must hold ",
                     inputs.size(), " tensors, got ", list.size());
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors parts;
      for (const auto& list : outputs) parts.push_back(list[i]);
      require_cpu("all_gather_coalesced", inputs[i]);
      require_parts("all_gather_coalesced", parts, inputs[i], getSize());
      require_disjoint("all_gather_coalesced", parts);
      outs[i] = flatten(parts);
    }
    return flatten(inputs);
  });
  return start(plan, inputs, outputs, [this, ins, outs](shm::Deadline deadline) mutable {
    agree_on_count(ins.size(), deadline);
    for (size_t i = 0; i < ins.size(); ++i) all_gather(ins[i], pointers(outs[i]), deadline);
    for (auto& list : outs) write_back(list);
  });
}

GossamerBackend::Reply GossamerBackend::gather(Lists& outputs, Tensors& inputs,
                                               const c10d::GatherOptions& options) {
  if (auto* other = elsewhere(inputs)) return other->gather(outputs, inputs, options);
  const Plan plan{c10d::OpType::GATHER, "gossamer:gather", options.timeout, options.asyncOp};
  const int root = static_cast<int>(options.rootRank);
  std::vector<Flat> outs;
  Flat in = checked(plan, [&] {
    const auto& input = only("gather", inputs);
    require_root("gather", options.rootRank, getSize());
    const size_t lists = getRank() == root ? 1 : 0;
    check_argument(outputs.size() == lists, "gather: lists of outputs on rank ", getRank(), " with root ",
                   root, " must be ", lists, ", got ", outputs.size());
    if (lists) {
      require_parts("gather", outputs[0], input, getSize());
      require_disjoint("gather", outputs[0]);
      outs = flatten(outputs[0]);
    }
    return Flat(input);
  });
  return start(plan, inputs, outputs, [this, in, outs, root](shm::Deadline deadline) mutable {
    const auto to = pointers(outs);
    hosts_ ? hosts_->gather(in.data(), to.data(), in.bytes(), root, deadline)
           : shm::gather(*group_, in.data(), to.data(), in.bytes(), root, deadline);
    write_back(outs);
  });
}

GossamerBackend::Reply GossamerBackend::scatter(Tensors& outputs, Lists& inputs,
                                                const c10d::ScatterOptions& options) {
  if (auto* other = elsewhere(outputs)) return other->scatter(outputs, inputs, options);
  const Plan plan{c10d::OpType::SCATTER, "gossamer:scatter", options.timeout, options.asyncOp};
  const int root = static_cast<int>(options.rootRank);
  std::vector<Flat> ins;
  Flat out = checked(plan, [&] {
    const auto& output = only("scatter", outputs);
    require_disjoint("scatter", output);
    require_root("scatter", options.rootRank, getSize());
    const size_t lists = getRank() == root ? 1 : 0;
    check_argument(inputs.size() == lists, "scatter: lists of inputs on rank ", getRank(), " with root ",
                   root, " must be ", lists, ", got ", inputs.size());
    if (lists) {
      require_parts("scatter", inputs[0], output, getSize());
      ins = flatten(inputs[0]);
    }
    return Flat(output);
  });
  return start(plan, outputs, {outputs}, [this, ins, out, root](shm::Deadline deadline) mutable {
    const auto from = pointers(ins);
    hosts_ ? hosts_->scatter(from.data(), out.data(), out.bytes(), root, deadline)
           : shm::scatter(*group_, from.data(), out.data(), out.bytes(), root, deadline);
    out.write_back();
  });
}

void GossamerBackend::all_to_all(const std::vector<void*>& ins, const std::vector<int64_t>& in_bytes,
                                 const std::vector<void*>& outs, const std::vector<int64_t>& out_bytes,
                                 shm::Deadline deadline) {
  hosts_ ? hosts_->all_to_all(ins.data(), in_bytes.data(), outs.data(), out_bytes.data(), deadline)
         : shm::all_to_all(*group_, ins.data(), in_bytes.data(), outs.data(), out_bytes.data(), deadline);
}

GossamerBackend::Reply GossamerBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                      std::vector<int64_t>& output_splits,
                                                      std::vector<int64_t>& input_splits,
                                                      const c10d::AllToAllOptions& options) {
  if (auto* other = elsewhere(input))
    return other->alltoall_base(output, input, output_splits, input_splits, options);
  const Plan plan{c10d::OpType::ALLTOALL_BASE, "gossamer:all_to_all", options.timeout, options.asyncOp};
  std::vector<int64_t> in_sizes;
  std::vector<int64_t> out_sizes;
  auto flats = checked(plan, [&] {
    require_disjoint("all_to_all", output);
    in_sizes = split_sizes("all_to_all", input, input_splits, getSize());
    out_sizes = split_sizes("all_to_all", output, output_splits, getSize());
    check_argument(input.scalar_type() == output.scalar_type(),
                   "all_to_all: input and output must have one dtype, got ", input.scalar_type(), " and ",
                   output.scalar_type());
    return flatten({input, output});
  });
  const Tensors outputs{output};
  return start(plan, {input}, outputs, [this, flats, in_sizes, out_sizes](shm::Deadline deadline) mutable {
    const Parts from(flats[0], in_sizes);
    const Parts to(flats[1], out_sizes);
    all_to_all(from.pointers, from.bytes, to.pointers, to.bytes, deadline);
    flats[1].write_back();
  });
}

GossamerBackend::Reply GossamerBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllToAllOptions& options) {
  if (auto* other = elsewhere(inputs)) return other->alltoall(outputs, inputs, options);
  const Plan plan{c10d::OpType::ALLTOALL, "gossamer:all_to_all", options.timeout, options.asyncOp};
  std::vector<Flat> ins;
  auto outs = checked(plan, [&] {
    for (const auto* list : {&outputs, &inputs}) {
      check_argument(static_cast<int>(list->size()) == getSize(), "all_to_all: one tensor a rank, ",
                     getSize(), " in all, got ", list->size());
      for (const auto& tensor : *list) require_cpu("all_to_all", tensor);
    }
    require_disjoint("all_to_all", outputs);
    ins = flatten(inputs);
    return flatten(outputs);
  });
  return start(plan, inputs, {outputs}, [this, ins, outs](shm::Deadline deadline) mutable {
    std::vector<int64_t> in_bytes;
    std::vector<int64_t> out_bytes;
    for (const auto& in : ins) in_bytes.push_back(in.bytes());
    for (const auto& out : outs) out_bytes.push_back(out.bytes());
    all_to_all(pointers(ins), in_bytes, pointers(outs), out_bytes, deadline);
    write_back(outs);
  });
}

GossamerBackend::Reply GossamerBackend::barrier(const c10d::BarrierOptions& options) {
  if (elsewhere_.type() && !options.device_ids.empty()) {  // torch does not hand on options.device
    const auto index = static_cast<c10::DeviceIndex>(options.device_ids[0]);
    return backend_of({*elsewhere_.type(), index}).barrier(options);
  }
  const Plan plan{c10d::OpType::BARRIER, "gossamer:barrier", options.timeout, options.asyncOp};
  return start(plan, {}, {}, [this](shm::Deadline deadline) {
    hosts_ ? hosts_->barrier(deadline) : shm::barrier(*group_, deadline);
  });
}

void GossamerBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  c10d::BarrierOptions now = options;
  now.asyncOp = false;
  if (const auto work = barrier(now)) work->wait();  // its errors name every missing rank
}

}  // namespace gossamer
