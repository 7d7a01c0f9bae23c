// See adasum_pair.h.
#include "named/adasum_pair.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "adasum/adasum.h"
#include "collectives/two_shot.h"

namespace gossamer::named {
namespace {

class NativePair : public AdasumPair {
 public:
  explicit NativePair(std::vector<int64_t> offsets) : offsets_(std::move(offsets)) {}

  at::Tensor sums(Range range, const at::Tensor& a, const at::Tensor& b) override {
    static_assert(sizeof(adasum::Sums) == 3 * sizeof(double), "a row of the result");
    auto rows = at::empty({vectors().count, 3}, at::kDouble);
    adasum::sums(to_dtype(a.scalar_type(), "adasum"), vectors(), range.begin, range.end, a.const_data_ptr(),
                 b.const_data_ptr(), static_cast<adasum::Sums*>(rows.data_ptr()));
    return rows;
  }

  void combine(Range range, const at::Tensor& mine, const at::Tensor& other, const at::Tensor& sums,
               bool mine_first) override {
    const auto* rows = static_cast<const adasum::Sums*>(sums.const_data_ptr());
    factors_.resize(vectors().count);
    for (int64_t v = 0; v < vectors().count; ++v) {
      factors_[v] = adasum::factors(rows[v]);
      if (!mine_first) std::swap(factors_[v].a, factors_[v].b);
    }
    adasum::combine(to_dtype(mine.scalar_type(), "adasum"), vectors(), range.begin, range.end,
                    mine.mutable_data_ptr(), other.const_data_ptr(), factors_.data());
  }

 private:
  adasum::Vectors vectors() const { return {offsets_.data(), static_cast<int64_t>(offsets_.size()) - 1}; }

  std::vector<int64_t> offsets_;
  std::vector<adasum::Factors> factors_;
};

// Works on kPart elements at a time, because float64 copies of everything would take eight times its memory.
class TorchPair : public AdasumPair {
 public:
  explicit TorchPair(std::vector<int64_t> offsets) : offsets_(std::move(offsets)) {}

  at::Tensor sums(Range range, const at::Tensor& a, const at::Tensor& b) override {
    auto rows = at::zeros({static_cast<int64_t>(offsets_.size()) - 1, 3}, a.options().dtype(at::kDouble));
    for (Range part : parts(range)) {
      const auto x = piece(a, range, part).to(at::kDouble), y = piece(b, range, part).to(at::kDouble);
      const auto [strips, strips_of_vector] = strips_in(part, a.device());
      const auto total = [&, &strips = strips, &per_vector = strips_of_vector](const at::Tensor& terms) {
        return sum_segments(sum_segments(terms, strips), per_vector);
      };
      rows.add_(at::stack({total(x * y), total(x * x), total(y * y)}, 1));
    }
    return rows;
  }

  void combine(Range range, const at::Tensor& mine, const at::Tensor& other, const at::Tensor& sums,
               bool mine_first) override {
    const auto a = factor(sums, 1), b = factor(sums, 2);
    for (Range part : parts(range)) {
      const auto lengths = lengths_in(part, mine.device());
      const auto spread = [&](const at::Tensor& factors) {
        return at::repeat_interleave(factors, lengths, 0, part.numel());
      };
      auto x = piece(mine, range, part);
      const auto y = piece(other, range, part).to(at::kDouble);
      x.copy_(x.to(at::kDouble) * spread(mine_first ? a : b) + y * spread(mine_first ? b : a));
    }
  }

 private:
  static constexpr int64_t kPart = 1 << 23, kStrip = 4096;

  static std::vector<Range> parts(Range range) {
    std::vector<Range> parts;
    for (int64_t i = range.begin; i < range.end; i += kPart)
      parts.push_back({i, std::min(i + kPart, range.end)});
    return parts;
  }

  static at::Tensor piece(const at::Tensor& x, Range range, Range part) {
    return x.narrow(0, part.begin - range.begin, part.numel());
  }

  static at::Tensor to_device(const std::vector<int64_t>& numbers, at::Device device) {
    return at::tensor(numbers, at::kLong).to(device);
  }

  // The number of elements of each vector in `part`.
  std::vector<int64_t> overlaps(Range part) const {
    std::vector<int64_t> lengths;
    for (size_t v = 0; v + 1 < offsets_.size(); ++v)
      lengths.push_back(
          std::max<int64_t>(0, std::min(offsets_[v + 1], part.end) - std::max(offsets_[v], part.begin)));
    return lengths;
  }
  at::Tensor lengths_in(Range part, at::Device device) const { return to_device(overlaps(part), device); }

  // A GPU sums a segment with one block of threads, so long vectors are cut into strips. Returns the strips' lengths, and
  // the number of strips of each vector.
  std::pair<at::Tensor, at::Tensor> strips_in(Range part, at::Device device) const {
    std::vector<int64_t> lengths, counts;
    for (const int64_t numel : overlaps(part)) {
      counts.push_back((numel + kStrip - 1) / kStrip);
      for (int64_t i = 0; i < numel; i += kStrip) lengths.push_back(std::min(kStrip, numel - i));
    }
    return {to_device(lengths, device), to_device(counts, device)};
  }

  static at::Tensor sum_segments(const at::Tensor& terms, const at::Tensor& lengths) {
    return at::segment_reduce(terms, "sum", lengths, {}, {}, 0, /*unsafe=*/true, /*initial=*/0);
  }

  // As adasum::factors; a NaN norm reaches the result.
  static at::Tensor factor(const at::Tensor& sums, int64_t norm_column) {
    const auto norm = sums.select(1, norm_column);
    return at::where(norm.lt(adasum::kNoNorm), at::ones_like(norm), 1.0 - sums.select(1, 0) / (2.0 * norm));
  }

  std::vector<int64_t> offsets_;
};

}  // namespace

std::unique_ptr<AdasumPair> native_pair(std::vector<int64_t> offsets) {
  return std::make_unique<NativePair>(std::move(offsets));
}

std::unique_ptr<AdasumPair> torch_pair(std::vector<int64_t> offsets) {
  return std::make_unique<TorchPair>(std::move(offsets));
}

}  // namespace gossamer::named
