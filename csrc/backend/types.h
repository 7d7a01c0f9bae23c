// Maps torch's dtypes and reduce operations to those of the shared-memory core, and tensors to flat memory.
// Used by the backend's operations.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "shm/collectives.h"

namespace gossamer {

shm::Type to_shm(at::ScalarType type, const char* where);

// Throws PythonError(config) where `op` is not defined for `type`. `size` is what AVG divides by.
shm::Summing to_shm(const c10d::ReduceOp& op, at::ScalarType type, int size, const char* where);

// The factor of PREMUL_SUM: a number or a tensor. Throws PythonError(config) if there is none.
const c10d::NCCLPreMulSumSupplement& supplement_of(const c10d::ReduceOp& op);

// Whether torch has made floats of complex numbers for the backend, by view_as_real().
inline bool is_of_complex(const at::Tensor& x) { return x.is_view() && x._base().is_complex(); }

// A tensor as contiguous memory: the tensor itself, or a copy if it is strided. Autograd does not see the writes.
class Flat {
 public:
  // `later`: the operation may run after the call has returned, when the caller may have given the tensor other memory.
  explicit Flat(const at::Tensor& tensor, bool later = true);
  void* data() const { return flat_.data_ptr(); }
  int64_t bytes() const { return static_cast<int64_t>(flat_.nbytes()); }
  int64_t numel() const { return flat_.numel(); }
  const at::Tensor& tensor() const { return flat_; }
  bool of_complex() const { return of_complex_; }
  void write_back();  // copies the result into the strided tensor, if there is one

 private:
  at::Tensor tensor_;
  at::Tensor flat_;
  bool same_;
  bool of_complex_;
};

std::vector<Flat> flatten(const std::vector<at::Tensor>& tensors);
std::vector<void*> pointers(const std::vector<Flat>& flats);
void write_back(std::vector<Flat>& flats);

// Pointers to the `parts` equal parts of one flat tensor.
std::vector<void*> parts_of(const Flat& flat, int parts);

}  // namespace gossamer
