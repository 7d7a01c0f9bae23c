// A bucket: parameters that travel together, one dtype, one device, and flat memory for each of their fields:
// "grad", "weight", and whatever state an algorithm keeps. Knows nothing of hooks or of when it is sent; see engine.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "flat/flat.h"

namespace gossamer {

class Bucket {
 public:
  // `indices` and `names` are those of the parameters in the engine's list. Views start at multiples of 64 bytes and
  // of `block` elements, so that no codec block holds two parameters; the total is a multiple of `alignment`
  // elements too. Padding is zero.
  Bucket(int64_t index, std::vector<int64_t> indices, std::vector<at::Tensor> params,
         std::vector<std::string> names, int64_t block, int64_t alignment);

  int64_t index() const { return index_; }
  int64_t numel() const { return numel_; }
  int64_t step() const { return step_; }  // synchronised backwards before the one it is in
  void set_step(int64_t step) { step_ = step; }
  int64_t bytes() const { return numel_ * static_cast<int64_t>(params_[0].element_size()); }
  const std::vector<int64_t>& indices() const { return indices_; }
  const std::vector<at::Tensor>& params() const { return params_; }
  const std::vector<std::string>& names() const { return names_; }
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t numel_of(size_t position) const { return numels_[position]; }

  // Zeros [numel] that last as long as the bucket; a field that exists is returned as it is. With a communicator,
  // which all ranks then give at the same time, it is memory that its wire can reach. `dtype` defaults to the
  // parameters'.
  at::Tensor add_field(const std::string& field, Communicator* comm, std::optional<at::ScalarType> dtype);
  bool has(const std::string& field) const { return fields_.count(field) != 0; }
  std::vector<std::string> fields() const;
  at::Tensor flat(const std::string& field) const;                       // [numel]
  const std::vector<at::Tensor>& views(const std::string& field) const;  // one a parameter, in its shape

  // Brings the parameter's fresh gradient into the flat memory (times scale) and makes it a view of it, at once:
  // while it is in the cache, and so that its own memory is freed. CPU only; one launch per tensor costs too much.
  void take(size_t position, double scale);

  // The same for every gradient that was not taken, in one pass: fresh ones are copied, views are scaled in place.
  // A parameter without a gradient contributes zeros and stays without one. Padding is zero afterwards.
  void gather(double scale);

  // Gradients that exist, and weights that are not there (any more), move into the memory of their field.
  void adopt_gradients();  // if there is a field for them
  void adopt_weights();

  // Zeroes what lies between the parameters. Needed only after something has written there, such as a codec: NaN,
  // where the neighbour's block had one.
  void clear_padding(const std::string& field);

  // Zeroes the field where this rank has no gradient, and returns (view, what was in it) to put back: if no rank has
  // one, what is sent of such a parameter is thrown away, and must be nothing.
  std::vector<std::pair<at::Tensor, at::Tensor>> set_aside(const std::string& field);

  std::string describe() const;  // "bucket 2 (grad, 6.3 MB)"

 private:
  struct Field {
    at::Tensor flat;
    std::vector<at::Tensor> views;
  };
  const Field& field(const std::string& name) const;
  bool is_fresh(const at::Tensor& grad, size_t position) const;
  // `more`: segments of the field "grad" for the same pass.
  void copy_in(const std::vector<size_t>& positions, double scale, std::vector<flat::Segment> more);
  std::vector<flat::Segment> padding() const;

  int64_t index_;
  int64_t numel_ = 0;
  int64_t step_ = 0;
  std::vector<int64_t> indices_;
  std::vector<at::Tensor> params_;
  std::vector<std::string> names_;
  std::vector<int64_t> numels_;  // as planned: a parameter may be changed afterwards
  std::vector<int64_t> offsets_;
  at::Device device_;
  at::ScalarType dtype_;
  std::map<std::string, Field> fields_;
  std::vector<bool> taken_;  // already copied and scaled in this backward
};

}  // namespace gossamer
