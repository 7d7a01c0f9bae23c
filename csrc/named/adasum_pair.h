// One step of Adasum on tensors: the sums over two pieces of a buffer of vectors, and their combination. On the CPU by
// adasum/adasum.h, on other devices by torch's operations, which follow the same rules but add in another order. Not how the
// pieces come to be on one rank: adasum.cpp, which calls this.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace gossamer::named {

// A part of the buffer, in elements.
struct Range {
  int64_t begin, end;
  int64_t numel() const { return end - begin; }
};

class AdasumPair {
 public:
  virtual ~AdasumPair() = default;

  // a and b hold the elements of `range` alone. The result, float64 on their device, has a row for each vector of the
  // buffer: a.b, |a|^2, |b|^2, zeros where the range has none of its elements.
  virtual at::Tensor sums(Range range, const at::Tensor& a, const at::Tensor& b) = 0;

  // mine becomes the combination of both, by the sums over whole vectors; mine is a where `mine_first`.
  virtual void combine(Range range, const at::Tensor& mine, const at::Tensor& other, const at::Tensor& sums,
                       bool mine_first) = 0;
};

// offsets: where the vectors begin, and the end of the last.
std::unique_ptr<AdasumPair> native_pair(std::vector<int64_t> offsets);
std::unique_ptr<AdasumPair> torch_pair(std::vector<int64_t> offsets);

}  // namespace gossamer::named
