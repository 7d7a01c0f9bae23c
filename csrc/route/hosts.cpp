// See hosts.h. Between two meetings of a host's ranks only the carrier touches its part, in the memory of all of them. So
// a piece is summed while the piece before it crosses the network, and nothing else keeps the ranks in step.
#include "route/hosts.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "backend/across.h"
#include "backend/peers.h"
#include "device_kernels.h"
#include "errors.h"
#include "float_dtype.h"
#include "observe/recorder.h"
#include "route/peers.h"
#include "route/route.h"
#include "route/rows.h"

namespace gossamer {
namespace {

constexpr int64_t kResultAlignment = 16;  // bytes

struct Sum {  // one call
  ByHosts& comm;
  at::Tensor x;  // [numel]
  Dtype dtype;
  const DeviceKernels& kernels;
  int64_t share;          // elements of a part
  int64_t begin, numel;   // this rank's part; empty where it carries none
  double inside, beyond;  // the scale as two factors
  at::Tensor error;

  at::Tensor own_part() const { return x.narrow(0, begin, numel); }
  at::Tensor error_of_part() const { return error.defined() ? error.narrow(0, begin, numel) : error; }
};

Dtype float_of(const at::Tensor& x) {
  const auto dtype = float_dtype(x.scalar_type());
  check_argument(dtype.has_value(), "sum by hosts: dtype must be a float, got ", x.scalar_type());
  return *dtype;
}

// call(first, numel) for each range of the part that lies in this piece of a chunk.
template <class Call>
void each_range(const Sum& sum, int64_t chunk, int64_t begin, int64_t numel, const Call& call) {
  for (int64_t first = begin; first < sum.numel; first += chunk)
    call(first, std::min({numel, chunk - begin, sum.numel - first}));
}

// Where the ranks of a host meet: every rank's tensor, as this rank reads it; the places to which a carrier writes its part of
// the result, from the part's first element on; and memory in which it makes its part.
struct Ground {
  PeerBlock& block;
  std::vector<uint8_t*> tensors, results;
  at::Tensor part;  // [sum.numel]
};

void through_memory(const Sum& sum, const Ground& ground, const Across& across) {
  const int64_t ranks = sum.comm.inside().size();
  const auto element = static_cast<int64_t>(sum.x.element_size());
  uint8_t* part = bytes_of(ground.part);
  std::vector<void*> rows(static_cast<size_t>(ranks));
  const Around around{[&](int64_t chunk, int64_t begin, int64_t numel) {
                        const observe::Span span("sum", "host", ranks * numel * element);
                        each_range(sum, chunk, begin, numel, [&](int64_t first, int64_t length) {
                          for (size_t rank = 0; rank < rows.size(); ++rank)
                            rows[rank] = ground.tensors[rank] + (sum.begin + first) * element;
                          void* out = part + first * element;
                          sum.kernels.sum_rows(sum.dtype, {rows.data(), ranks, &out, 1, length}, sum.inside);
                        });
                      },
                      [&](int64_t chunk, int64_t begin, int64_t numel) {
                        const observe::Span span("spread", "host", ranks * numel * element);
                        std::vector<flat::Segment> segments;
                        each_range(sum, chunk, begin, numel, [&](int64_t first, int64_t length) {
                          for (uint8_t* result : ground.results)
                            segments.push_back({result + first * element, first, length});
                        });
                        sum.kernels.scatter(sum.dtype, segments.data(), static_cast<int64_t>(segments.size()),
                                            part, 1.0);
                      }};
  meet(ground.block);
  if (sum.numel > 0) {
    try {
      across(*sum.comm.across(), ground.part, sum.beyond, sum.error_of_part(), around);
    } catch (const CallsDiffer&) {
      // All ranks of the host learn of it in the meeting.
    }
    const int64_t moved = 2 * (ranks - 1) * sum.numel * element;
    sum.comm.count(moved, moved);
  }
  meet(ground.block);
  sum.comm.inside().wait_for_device();
  sum.comm.end_call();
}

// The tensors lie in memory that the ranks read in each other. A carrier writes into all of them.
void through_tensors(const Sum& sum, PeerBlock& block, const Across& across) {
  const auto me = static_cast<size_t>(sum.comm.inside().rank());
  const auto element = static_cast<int64_t>(sum.x.element_size());
  const int64_t offset = bytes_of(sum.x) - block.bases().at(me);
  Ground ground{block, block.bases(), {}, sum.own_part()};
  for (uint8_t*& tensor : ground.tensors) tensor += offset;
  for (size_t rank = 0; rank < ground.tensors.size(); ++rank)
    if (rank != me) ground.results.push_back(ground.tensors[rank] + sum.begin * element);
  through_memory(sum, ground, across);
}

// The tensors lie elsewhere, perhaps on devices. A rank copies to shared memory what others carry. A carrier leaves its result
// in its own such memory, where the others read it; no rank overwrites a result before all have come to the next meeting. On
// the CPU it makes the result there, so a tensor changes only at the end.
void through_copies(const Sum& sum, const Across& across) {
  Communicator& inside = sum.comm.inside();
  const auto me = static_cast<size_t>(inside.rank());
  const auto element = static_cast<int64_t>(sum.x.element_size());
  Route::Shared& shared =
      Route::of(inside).shared(inside, chunk_numel(sum.share * element, 1, kResultAlignment));
  const int64_t results = inside.size() * shared.row_bytes;
  const auto& bases = shared.block->bases();
  std::vector<flat::Segment> copied, parts;
  for (int64_t carrier = 0; carrier < sum.comm.carriers(); ++carrier) {
    const int64_t begin = std::min(carrier * sum.share, sum.x.numel());
    const int64_t length = std::min(sum.share, sum.x.numel() - begin);
    const bool own = carrier == inside.rank();
    if (length > 0 && !own) copied.push_back({bases.at(me) + begin * element, begin, length});
    if (length > 0 && (!own || sum.x.is_cpu()))
      parts.push_back({bases.at(static_cast<size_t>(carrier)) + results, begin, length});
  }
  Ground ground{*shared.block, bases, {}, sum.own_part()};
  ground.tensors[me] = bytes_of(sum.x);
  if (sum.x.is_cpu()) {
    ground.part = at::from_blob(bases[me] + results, {sum.numel}, sum.x.options());
  } else {
    ground.results = {bases[me] + results};
  }
  sum.kernels.scatter(sum.dtype, copied.data(), static_cast<int64_t>(copied.size()), sum.x.data_ptr(), 1.0);
  through_memory(sum, ground, across);
  sum.kernels.gather(sum.dtype, parts.data(), static_cast<int64_t>(parts.size()), sum.x.data_ptr(), 1.0);
}

// The sum of this rank's part of all ranks' tensors, if it carries one. A backend's own reduction would round in the tensor's
// dtype, in an order that depends on the tensor's size.
at::Tensor sum_in_rank_order(const Sum& sum, const at::Tensor& whole) {
  Communicator& inside = sum.comm.inside();
  const int64_t ranks = inside.size(), carriers = sum.comm.carriers();
  const bool carries = sum.comm.across() != nullptr;
  const at::Tensor parts = at::empty({carries ? ranks * sum.share : 0}, whole.options());
  if (ranks == carriers) {
    inside.all_to_all(parts, whole)->wait();
  } else {
    const int64_t bytes = sum.share * static_cast<int64_t>(whole.element_size());
    std::vector<int64_t> to_carriers(static_cast<size_t>(ranks), 0);
    std::fill_n(to_carriers.begin(), carriers, bytes);
    const std::vector<int64_t> from_all(static_cast<size_t>(ranks), carries ? bytes : 0);
    inside.all_to_all_unequal(parts.view(at::kByte), whole.view(at::kByte), from_all, to_carriers)->wait();
  }
  if (!carries) return {};
  at::Tensor own = at::empty({sum.share}, whole.options());
  std::vector<void*> rows;
  for (int64_t rank = 0; rank < ranks; ++rank)
    rows.push_back(parts.narrow(0, rank * sum.share, sum.share).data_ptr());
  void* out = own.data_ptr();
  sum.kernels.sum_rows(sum.dtype, {rows.data(), ranks, &out, 1, sum.share}, sum.inside);
  return own;
}

// For ranks of a host that do not read each other's memory: NCCL, and islands of several hosts.
void by_operations(const Sum& sum, const Across& across) {
  Communicator& inside = sum.comm.inside();
  const int64_t carriers = sum.comm.carriers();
  const bool equal = inside.size() == carriers;
  at::Tensor whole = sum.x;
  if (whole.numel() != sum.share * carriers) {
    whole = at::zeros({sum.share * carriers}, sum.x.options());
    whole.narrow(0, 0, sum.x.numel()).copy_(sum.x);
  }
  const auto part = [&](int64_t carrier) { return whole.narrow(0, carrier * sum.share, sum.share); };
  const auto own = sum_in_rank_order(sum, whole);
  if (sum.numel > 0)
    across(*sum.comm.across(), own.narrow(0, 0, sum.numel), sum.beyond, sum.error_of_part(), {});
  if (equal) {
    sum.comm.back().all_gather(whole, own)->wait();
  } else {
    if (own.defined()) part(inside.rank()).copy_(own);
    for (int carrier = 0; carrier < carriers; ++carrier)
      sum.comm.back().broadcast(part(carrier), carrier)->wait();
  }
  if (whole.data_ptr() != sum.x.data_ptr()) at::Tensor(sum.x).copy_(whole.narrow(0, 0, sum.x.numel()));
}

}  // namespace

void sum_by_hosts(ByHosts& comm, const at::Tensor& x, double scale, int64_t block, const at::Tensor& error,
                  const Across& across) {
  if (x.numel() == 0) return;
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  const at::Tensor flat = x.view({x.numel()});
  const int64_t carriers = comm.carriers();
  const int64_t share = chunk_numel(flat.numel(), carriers, block);
  const bool carries = comm.across() != nullptr;
  const int64_t begin = std::min(carries ? comm.inside().rank() * share : 0, flat.numel());
  const int64_t numel = carries ? std::min(share, flat.numel() - begin) : 0;
  // Sums of float16 could overflow before they are scaled, so they are scaled first.
  const double inside = x.scalar_type() == at::kHalf ? 1.0 / static_cast<double>(comm.largest_host()) : 1.0;
  Sum sum{comm,           flat,
          float_of(x),    device_kernels(x.device().type()),
          share,          begin,
          numel,          inside,
          scale / inside, error.defined() ? error.view({error.numel()}) : error};
  if (!comm.inside().shares_memory()) return by_operations(sum, across);
  if (PeerBlock* peers = comm.inside().peers_of(flat)) return through_tensors(sum, *peers, across);
  through_copies(sum, across);
}

}  // namespace gossamer
