// The two-shot collectives: a communicator and a codec make an all-reduce, a reduce-scatter or an all-gather.
// Chunk j is summed by rank j alone, in rank order, in float32 (float64 for float64), encoded once, and every
// rank (the owner too) decodes the same bytes. Straight-line blocking code; the engine decides when it runs.
#pragma once

#include <ATen/core/Tensor.h>

#include "codec/codec.h"
#include "route/hosts.h"
#include "route/rows.h"

namespace gossamer {

// Where an encoding stands in a collective; each has random numbers of its own.
enum class Phase : uint64_t { alone = 0, first = 1, reduced = 2 };

// What a codec object in Python holds: the spec without the dtype, which the tensor brings.
struct CodecChoice {
  codec::Kind kind;
  int64_t block;
  bool stochastic = false;  // round by random numbers, made from `seed` and what `key` is told
  uint64_t seed = 0;

  uint64_t key(uint64_t nonce, Phase phase, int rank) const;  // of codec::Spec; 0 unless stochastic
  bool is_divisible() const;                                  // see Shape in route/rows.h
  // Throws PythonError(codec) for a dtype it cannot encode. The key is 0, which decoding does not look at.
  codec::Spec spec(at::ScalarType type) const;
};

Dtype to_dtype(at::ScalarType type, const char* where);

// With a stochastic codec, ranks and the two encodings of a value draw different random numbers; calls draw
// different ones where `nonce` differs.
namespace two_shot {

// x (contiguous, any size) becomes scale * sum over ranks, in place. By hosts where comm is.
void all_reduce(Communicator& comm, const CodecChoice& codec, at::Tensor x, double scale, Scratch& scratch,
                uint64_t nonce = 0, const Around& around = {});

// x becomes the sum over ranks: by the group's own all-reduce, or exactly by hosts. NCCL knows its hosts itself.
void all_reduce(Communicator& comm, at::Tensor x, Scratch& scratch);

// As through a codec, for what that leaves out: `error` (contiguous, x.numel() elements, float32 or, for float64 tensors,
// float64) is this rank's memory of it, zero at first. It is added to x before encoding and then holds what was left
// out, by this rank of its own values and of its chunk of the result. Defined in feedback.cpp.
void all_reduce_with_error(Communicator& comm, const CodecChoice& codec, at::Tensor x, double scale,
                           Scratch& scratch, uint64_t nonce, at::Tensor error, const Around& around = {});

// out becomes this rank's part of scale * sum over ranks; x.numel() == size * out.numel().
void reduce_scatter(Communicator& comm, const CodecChoice& codec, at::Tensor out, at::Tensor x, double scale,
                    Scratch& scratch, uint64_t nonce = 0);

// out becomes every rank's x as it arrives through the codec; out.numel() == size * x.numel().
void all_gather(Communicator& comm, const CodecChoice& codec, at::Tensor out, at::Tensor x, Scratch& scratch,
                uint64_t nonce = 0);

}  // namespace two_shot
}  // namespace gossamer
