// One step of Adasum on tensors: the sums over two pieces of a buffer of vectors, and their combination. The CPU uses
// adasum/adasum.h; other devices use torch's operations, which follow the same rules but add in another order. How the
// pieces come to one rank is in adasum.cpp, which calls this.
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

  // a and b hold only the elements of `range`. The result, float64 on their device, has a row for each vector of the
  // buffer: a.b, |a|^2, |b|^2; zeros where the range has none of the vector's elements.
  virtual at::Tensor sums(Range range, const at::Tensor& a, const at::Tensor& b) = 0;

  // mine becomes the combination of both, by the sums over whole vectors. mine is vector a if `mine_first`, else b.
  virtual void combine(Range range, const at::Tensor& mine, const at::Tensor& other, const at::Tensor& sums,
                       bool mine_first) = 0;
};

// offsets: where the vectors begin, and the end of the last.
std::unique_ptr<AdasumPair> native_pair(std::vector<int64_t> offsets);
std::unique_ptr<AdasumPair> torch_pair(std::vector<int64_t> offsets);

}  // namespace gossamer::named
