// The collectives of one host, each a loop of rounds in a file of its own. Blocking; all local ranks make the same call.
// `peers`, `ins`, `outs` and `bytes` have one entry for each local rank, in rank order. The caller owns the memory, which
// may have any alignment. All ranks throw an Error(config) alike, and the group goes on; an Error(comm) breaks the group.
#pragma once

#include <cstdint>
#include <functional>

#include "shm/group.h"
#include "shm/reduce.h"

namespace gossamer::shm {

// What is summed, and how; for avg the divisor is set, see reduce.h.
struct Summing {
  Fold reduction;
  double factor = 1;  // this rank's factor of premul_sum
};

// What the ranks of a sum compare. `count`: elements of the part whose size is equal on all ranks.
inline Call call_for(CallKind kind, int64_t count, const Summing& summing, int root = -1) {
  Call call;
  call.kind = kind;
  call.type = static_cast<int32_t>(summing.reduction.from);
  call.op = static_cast<int32_t>(summing.reduction.op);
  call.root = root;
  call.count = count;
  call.factor = summing.factor;
  return call;
}
// The same for bytes that are moved and not summed.
inline Call call_for(CallKind kind, int64_t bytes, int root = -1) {
  Call call;
  call.kind = kind;
  call.root = root;
  call.count = bytes;
  return call;
}

// The same tensor in the memory of each local rank, if this rank maps all of them. See symmetric.h.
struct Window {
  int64_t id = 0;      // equal on all ranks, never 0
  int64_t offset = 0;  // of the tensor in it, bytes
  void* const* peers = nullptr;
};

// data = fold of data over the ranks, in place. `window`: may be null; used if all ranks give the same one.
void all_reduce(Group& group, void* data, int64_t count, const Summing& summing, const Window* window,
                Deadline deadline);

// out = fold of the ranks' ins[rank of the caller]. counts[p]: elements of ins[p], equal on all ranks.
void reduce_scatter(Group& group, const void* const* ins, void* out, const int64_t* counts,
                    const Summing& summing, Deadline deadline);

// On `root`: out = fold of the ranks' in; out may be in. Elsewhere out is not touched.
void reduce(Group& group, const void* in, void* out, int64_t count, const Summing& summing, int root,
            Deadline deadline);

// outs[p] = the `in` of rank p, of bytes[p]. outs[own] may be in.
void all_gather(Group& group, const void* in, void* const* outs, const int64_t* bytes, Deadline deadline);

// ins[p] of in_bytes[p] go to rank p; outs[p] of out_bytes[p] come from it.
void all_to_all(Group& group, const void* const* ins, const int64_t* in_bytes, void* const* outs,
                const int64_t* out_bytes, Deadline deadline);

// What all_to_all compares. entry(r, p) is the bytes that rank r sends to rank p; entry(r, size + p) the bytes that it
// expects from p. Throws Error(config) if two ranks differ; `global_rank` names them. Returns the largest.
int64_t compare_splits(int size, const std::function<int(int)>& global_rank,
                       const std::function<int64_t(int, int)>& entry);

void broadcast(Group& group, void* data, int64_t bytes, int root, Deadline deadline);

// On `root`: outs[p] = the `in` of rank p.
void gather(Group& group, const void* in, void* const* outs, int64_t bytes, int root, Deadline deadline);

// out = ins[rank of the caller] of `root`.
void scatter(Group& group, const void* const* ins, void* out, int64_t bytes, int root, Deadline deadline);

void barrier(Group& group, Deadline deadline);

// Compares what the ranks are about to do. Throws as an operation whose calls differ does.
void agree(Group& group, const Call& call, Deadline deadline);

// Checks that all ranks go on with the same number of operations, `count`.
void agree_on_count(Group& group, int64_t count, Deadline deadline);

}  // namespace gossamer::shm
