// A bucket: parameters that travel together, one dtype, one device, and the flat memory of their gradients.
// Knows nothing of hooks or of when it is sent; see engine.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace gossamer {

class Bucket {
 public:
  // `indices` name the parameters in the engine's list. Views start at multiples of 64 bytes and of `block`
  // elements, so that no codec block holds two parameters; the total is padded with zeros to a multiple of
  // `alignment` elements too.
  Bucket(int64_t index, std::vector<int64_t> indices, std::vector<at::Tensor> params, int64_t block,
         int64_t alignment, Communicator& comm);

  int64_t index() const { return index_; }
  int64_t numel() const { return numel_; }
  int64_t step() const { return step_; }  // synchronised backwards before the one it is in
  void set_step(int64_t step) { step_ = step; }
  int64_t bytes() const { return numel_ * static_cast<int64_t>(grad_.element_size()); }
  const std::vector<int64_t>& indices() const { return indices_; }
  const std::vector<at::Tensor>& params() const { return params_; }
  at::Device device() const { return grad_.device(); }

  at::Tensor flat(const std::string& field) const;  // "grad"; [numel]
  std::vector<at::Tensor> views(const std::string& field) const;
  const at::Tensor& grad_view(size_t position) const { return views_[position]; }

  // Brings the parameter's fresh gradient into the flat memory (times scale) and makes it a view of it, at once:
  // while it is in the cache, and so that its own memory is freed. CPU only; one launch per tensor costs too much.
  void take(size_t position, double scale);

  // The same for every gradient that was not taken, in one pass: fresh ones are copied, views are scaled in place.
  // A parameter without a gradient contributes zeros and stays without one.
  void gather(double scale);

  // Zeroes what lies between the views. Needed only after something has written there.
  void clear_padding();

  std::string describe() const;  // "bucket 2 (grad, 6.3 MB)"

 private:
  bool is_fresh(const at::Tensor& grad, size_t position) const;
  void copy_in(const std::vector<size_t>& positions, double scale);

  int64_t index_;
  int64_t numel_ = 0;
  int64_t step_ = 0;
  std::vector<int64_t> indices_;
  std::vector<at::Tensor> params_;
  std::vector<int64_t> offsets_;
  at::Tensor grad_;
  std::vector<at::Tensor> views_;
  std::vector<bool> taken_;  // already copied and scaled in this backward
};

}  // namespace gossamer
