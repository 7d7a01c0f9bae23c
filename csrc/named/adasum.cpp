// See adasum.h. Vector halving, distance doubling. At level 1, 2, 4, ... a rank swaps half of its piece with rank ^ level,
// which holds the same piece of another combination; each of the two combines the half that it keeps. A vector is then
// spread over 2 * level ranks, which add up their shares of its sums. At the end the halves go back the same way.
#include "named/adasum.h"

#include <ATen/DeviceGuard.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <memory>
#include <string>
#include <utility>

#include "errors.h"
#include "named/adasum_pair.h"

namespace gossamer::named {
namespace {

constexpr int64_t kKeptBytes = 128 << 20;  // of scratch memory, after a call

std::vector<int64_t> checked_offsets(const at::Tensor& flat, const std::vector<int64_t>& lengths) {
  const auto type = flat.scalar_type();
  check_argument(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble,
                 "adasum: dtype must be float16, bfloat16, float32 or float64, got ", type);
  check_argument(
      flat.dim() == 1 && flat.is_contiguous() && (flat.is_cpu() || flat.is_cuda()),
      "adasum: the tensor must be contiguous, of one dimension, on the CPU or a CUDA device, got shape ",
      flat.sizes(), " on ", flat.device());
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : lengths) {
    check_argument(length >= 0, "adasum: a length must not be negative, got ", length);
    offsets.push_back(offsets.back() + length);
  }
  check_argument(offsets.back() == flat.numel(), "adasum: lengths must add up to the tensor's ", flat.numel(),
                 " elements, got ", offsets.back());
  return offsets;
}

class Adasum {
 public:
  Adasum(Communicator& comm, at::Tensor flat, std::vector<int64_t> offsets, const AdasumOptions& options)
      : comm_(comm),
        flat_(std::move(flat)),
        scratch_(options.scratch != nullptr ? *options.scratch : own_scratch_),
        pair_(flat_.is_cpu() && !options.torch_ops ? native_pair(std::move(offsets))
                                                   : torch_pair(std::move(offsets))),
        rank_(comm.rank()),
        size_(comm.size()) {}

  void run() {
    int ranks = 1;  // the ranks that take part in the tree
    while (2 * ranks <= size_) ranks *= 2;
    if (rank_ >= ranks) {
      exchange(flat_, {}, rank_ - ranks);
      exchange({}, flat_, rank_ - ranks);
      return;
    }
    const Range whole{0, flat_.numel()};
    const bool folds = rank_ + ranks < size_;
    if (folds) {
      const auto other = scratch(whole.numel());
      exchange({}, other, rank_ + ranks);
      pair_->combine(whole, flat_, other, pair_->sums(whole, flat_, other), true);
    }
    combine_halves(whole, 1, ranks);
    if (folds) exchange(flat_, {}, rank_ + ranks);
  }

 private:
  // At first this rank holds elements `range` of a combination of `level` ranks. On return `range` of flat_ holds the
  // combination of all ranks of the tree.
  void combine_halves(Range range, int level, int ranks) {
    if (level == ranks) return;
    const int peer = rank_ ^ level;
    const bool first = (rank_ & level) == 0;
    const int64_t middle = range.begin + range.numel() / 2;
    const Range low{range.begin, middle}, high{middle, range.end};
    const Range kept = first ? low : high, given = first ? high : low;

    const auto mine = piece(kept), other = scratch(kept.numel());
    exchange(piece(given), other, peer);
    const auto sums = first ? pair_->sums(kept, mine, other) : pair_->sums(kept, other, mine);
    add_up(sums, level);
    pair_->combine(kept, mine, other, sums, first);

    combine_halves(kept, 2 * level, ranks);
    exchange(mine, piece(given), peer);
  }

  // Adds the sums of the 2 * level ranks that share a vector. Both ranks of a pair add the same two numbers, so all get
  // equal bits.
  void add_up(const at::Tensor& sums, int level) {
    const auto received = at::empty_like(sums);
    for (int step = 1; step <= level; step *= 2) {
      exchange(sums, received, rank_ ^ step);
      sums.add_(received);
    }
  }

  // Sends `given` and receives into `got`; either may be undefined.
  void exchange(const at::Tensor& given, const at::Tensor& got, int peer) {
    comm_.exchange({{got, given, peer, peer}})->wait();
  }

  at::Tensor piece(Range range) const { return flat_.narrow(0, range.begin, range.numel()); }

  at::Tensor scratch(int64_t numel) {
    const bool fits = scratch_.defined() && scratch_.device() == flat_.device() &&
                      scratch_.scalar_type() == flat_.scalar_type() && scratch_.numel() >= numel;
    if (!fits) {
      scratch_ = at::Tensor();  // free the old memory before asking for the new
      scratch_ = at::empty({numel}, flat_.options());
    }
    return scratch_.narrow(0, 0, numel);
  }

  Communicator& comm_;
  at::Tensor flat_, own_scratch_;
  at::Tensor& scratch_;
  std::unique_ptr<AdasumPair> pair_;
  int rank_, size_;
};

}  // namespace

void adasum(Communicator& comm, const at::Tensor& flat, const std::vector<int64_t>& lengths,
            const AdasumOptions& options) {
  auto offsets = checked_offsets(flat, lengths);
  if (flat.numel() == 0 || comm.size() == 1) return;
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard guard(at::device_of(flat));
  // detach() gives the same memory without a Python object: a backend's thread may drop the last reference without the GIL.
  Adasum(comm, flat.detach(), std::move(offsets), options).run();
  at::Tensor* const kept = options.scratch;
  if (kept != nullptr && kept->defined() && static_cast<int64_t>(kept->nbytes()) > kKeptBytes)
    *kept = at::Tensor();
}

}  // namespace gossamer::named
