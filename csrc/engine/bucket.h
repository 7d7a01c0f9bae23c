// A bucket: parameters of one dtype and device that travel together, and flat memory for each of their fields: "grad",
// "weight", and the state that an algorithm keeps. Knows nothing of hooks or of when it is sent; see engine.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "flat/flat.h"
#include "route/hosts.h"

namespace gossamer {

// Where the elements of a bucket's parameters lie in its flat memory.
struct Placement {
  struct Piece {
    int64_t begin;  // in the parameter, counted in the order of its memory
    int64_t numel;
    int64_t offset;  // in the flat memory
  };
  std::vector<std::vector<Piece>> pieces;  // one list a parameter
  int64_t numel = 0;                       // of the flat memory

  // One parameter after another. Each starts at a multiple of 64 bytes and of `block` elements, so that no codec block
  // holds two parameters. `numel` is also a multiple of `alignment` elements.
  static Placement in_turn(const std::vector<at::Tensor>& params, int64_t block, int64_t alignment);
};

// The view of flat memory that a weight in a bucket is; its storage is the whole memory, and the weight's is not.
std::optional<at::Tensor> flat_memory_of(const at::Tensor& weight);

class Bucket {
 public:
  // `indices` and `names` are those of the parameters in the engine's list. Padding is zero. `dtype` is that of the
  // gradients, and defaults to the parameters'.
  Bucket(int64_t index, std::vector<int64_t> indices, std::vector<at::Tensor> params,
         std::vector<std::string> names, Placement placement,
         std::optional<at::ScalarType> dtype = std::nullopt);

  int64_t index() const { return index_; }
  int64_t numel() const { return placement_.numel; }
  int64_t step() const { return step_; }  // synchronised backwards that have ended
  void set_step(int64_t step) { step_ = step; }
  int64_t bytes() const { return numel() * static_cast<int64_t>(c10::elementSize(dtype_)); }
  const std::vector<int64_t>& indices() const { return indices_; }
  const std::vector<at::Tensor>& params() const { return params_; }
  const std::vector<std::string>& names() const { return names_; }
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t numel_of(size_t position) const { return c10::multiply_integers(sizes_[position]); }

  // Returns zeros [numel] that live as long as the bucket, or the field if it exists. With a communicator, all ranks call
  // this at the same time, and the memory is one that the group's transport can reach. `dtype` defaults to the gradients'.
  at::Tensor add_field(const std::string& field, Communicator* comm, std::optional<at::ScalarType> dtype);
  bool has(const std::string& field) const { return fields_.count(field) != 0; }
  std::vector<std::string> fields() const;
  at::Tensor flat(const std::string& field) const;  // [numel]
  // One for each parameter, in its shape and in one piece.
  const std::vector<at::Tensor>& views(const std::string& field) const;

  // A copy of a field's values for one parameter, in the parameter's shape. set_value() replaces the values.
  at::Tensor value(const std::string& field, size_t position) const;
  void set_value(const std::string& field, size_t position, const at::Tensor& value);

  // Copies the parameter's fresh gradient (times scale) into the flat memory and makes the gradient a view of it, at once:
  // while it is in the cache, and so that its own memory is freed. CPU only: one kernel launch a tensor costs too much.
  void take(size_t position, double scale);

  // The same in one pass for every gradient that was not taken: fresh ones are copied, views are scaled in place.
  // A parameter without a gradient contributes zeros and stays without one. Padding is zero afterwards.
  void gather(double scale);

  // For gradients that stay where they are. `gradients` holds the address of each one's first element; elements are taken
  // in the order of the parameter's memory. `before` copies a part of them in, times scale, and zeroes its padding;
  // `after` copies it back. `unused`: this rank has no gradient for the parameter. Valid until the next call.
  Around around(const std::vector<uint8_t*>& gradients, std::vector<bool> unused, double scale);

  // Moves existing gradients, or weights outside it, into the memory of their field. Who still holds a weight's memory of
  // before, as a script that will put it back, keeps its values there.
  void adopt_gradients();  // if there is a field for them
  void adopt_weights();

  bool strayed() const;  // whether a weight lies elsewhere

  // Whether a weight lies elsewhere, and someone holds its memory here, so that the script will likely put it back.
  bool weights_held() const;

  // Makes the parameter's gradient a view of the flat memory.
  void give_gradient(size_t position) const;

  // Zeroes the gaps between parameters. Needed only after something wrote there, such as a codec: it writes NaN where a
  // neighbour's block had one.
  void clear_padding(const std::string& field);

  // Zeroes the field where this rank has no gradient, and returns (view, previous values) to put back. If no rank has a
  // gradient for such a parameter, what is sent for it is dropped, so it must be zero.
  std::vector<std::pair<at::Tensor, at::Tensor>> set_aside(const std::string& field);

  // Multiplies the whole field by scale, by the arithmetic of gather().
  void rescale(const std::string& field, double scale);

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
  void fill(const std::string& field, const std::vector<flat::Segment>& segments, double scale);
  at::Tensor shaped(const at::Tensor& flat, int64_t offset, size_t position) const;
  bool is_in_place(size_t position, const at::Tensor& weight) const;  // the parameter, at its weight
  at::Tensor piece_of(const std::string& field, const Placement::Piece& piece) const;

  int64_t index_;
  int64_t step_ = 0;
  std::vector<int64_t> indices_;
  std::vector<at::Tensor> params_;
  std::vector<std::string> names_;
  // As planned: a parameter may change afterwards.
  std::vector<std::vector<int64_t>> sizes_, strides_;
  Placement placement_;
  std::vector<flat::Segment> padding_;
  at::Device device_;
  at::ScalarType dtype_;
  std::map<std::string, Field> fields_;
  std::vector<bool> taken_;   // already copied and scaled in this backward
  std::vector<bool> unused_;  // without a gradient on this rank, in this backward
};

}  // namespace gossamer
