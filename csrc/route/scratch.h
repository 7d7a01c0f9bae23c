// Wire memory that is kept from call to call, so that a training step allocates nothing.
#pragma once

#include <ATen/core/Tensor.h>

namespace gossamer {

inline uint8_t* bytes_of(const at::Tensor& x) { return static_cast<uint8_t*>(x.data_ptr()); }

class Scratch {
 public:
  at::Tensor send(int64_t bytes, at::Device device) { return take(send_, bytes, device); }
  at::Tensor receive(int64_t bytes, at::Device device) { return take(receive_, bytes, device); }
  at::Tensor sum(int64_t bytes, at::Device device) { return take(sum_, bytes, device); }

 private:
  static at::Tensor take(at::Tensor& slot, int64_t bytes, at::Device device);
  at::Tensor send_, receive_, sum_;
};

}  // namespace gossamer
