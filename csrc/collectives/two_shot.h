// The two-shot collectives: a communicator and a codec make an all-reduce, a reduce-scatter or an all-gather.
// Chunk j is summed by rank j alone, in rank order, in float32 (float64 for float64), encoded once, and every
// rank (the owner too) decodes the same bytes. Straight-line blocking code; the engine decides when it runs.
#pragma once

#include <ATen/core/Tensor.h>

#include "codec/codec.h"
#include "comm/communicator.h"

namespace gossamer {

// What a codec object in Python holds: the spec without the dtype, which the tensor brings.
struct CodecChoice {
  codec::Kind kind;
  int64_t block;
  codec::Spec spec(at::ScalarType type) const;  // throws PythonError(codec) for a dtype it cannot encode
};

Dtype to_dtype(at::ScalarType type, const char* where);

// Wire memory that is kept from call to call, so that a training step allocates nothing.
class Scratch {
 public:
  at::Tensor send(int64_t bytes, at::Device device) { return take(send_, bytes, device); }
  at::Tensor receive(int64_t bytes, at::Device device) { return take(receive_, bytes, device); }
  at::Tensor own(int64_t bytes, at::Device device) { return take(own_, bytes, device); }
  at::Tensor sum(int64_t bytes, at::Device device) { return take(sum_, bytes, device); }

 private:
  static at::Tensor take(at::Tensor& slot, int64_t bytes, at::Device device);
  at::Tensor send_, receive_, own_, sum_;
};

namespace two_shot {

// x (contiguous, any size) becomes scale * sum over ranks, in place.
void all_reduce(Communicator& comm, const CodecChoice& codec, at::Tensor x, double scale, Scratch& scratch);

// out becomes this rank's part of scale * sum over ranks; x.numel() == size * out.numel().
void reduce_scatter(Communicator& comm, const CodecChoice& codec, at::Tensor out, at::Tensor x, double scale,
                    Scratch& scratch);

// out becomes every rank's x as it arrives through the codec; out.numel() == size * x.numel().
void all_gather(Communicator& comm, const CodecChoice& codec, at::Tensor out, at::Tensor x, Scratch& scratch);

}  // namespace two_shot
}  // namespace gossamer
