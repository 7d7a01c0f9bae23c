// The two-shot collectives: a communicator and a codec make an all-reduce, a reduce-scatter or an all-gather.
// Chunk j is summed by rank j alone, in rank order, in float32 (float64 for float64), encoded once, and every
// rank (the owner too) decodes the same bytes. Straight-line blocking code; the engine decides when it runs.
#pragma once

#include <ATen/core/Tensor.h>

#include "codec/codec.h"
#include "route/hosts.h"
#include "route/rows.h"

namespace gossamer {

// The place of an encoding in a collective. Each place draws its own random numbers.
enum class Phase : uint64_t { alone = 0, first = 1, reduced = 2 };

// What a Python codec object holds: the spec without the dtype, which comes from the tensor.
struct CodecChoice {
  codec::Kind kind;
  int64_t block;
  bool stochastic = false;  // round by random numbers, made from `seed` and the arguments of `key`
  uint64_t seed = 0;

  uint64_t key(uint64_t nonce, Phase phase, int rank) const;  // of codec::Spec; 0 unless stochastic
  bool is_divisible() const;                                  // see Shape in route/rows.h
  // Throws PythonError(codec) for a dtype that the codec cannot encode. The key is 0; decoding does not use it.
  codec::Spec spec(at::ScalarType type) const;
};

Dtype to_dtype(at::ScalarType type, const char* where);

// With a stochastic codec, each rank and each of the two encodings of a value draws its own random numbers. Calls draw
// different numbers if their `nonce` differs.
namespace two_shot {

// x (contiguous, any size) becomes scale * sum over ranks, in place. The sum goes by hosts where comm has hosts.
void all_reduce(Communicator& comm, const CodecChoice& codec, at::Tensor x, double scale, Scratch& scratch,
                uint64_t nonce = 0, const Around& around = {});

// x becomes the sum over ranks: by the group's own all-reduce, or exactly by hosts. NCCL handles its hosts itself.
void all_reduce(Communicator& comm, at::Tensor x, Scratch& scratch);

// The same with error feedback. `error` (contiguous, x.numel() elements, float32, or float64 for float64 tensors) is this
// rank's memory, zero at first. It is added to x before encoding. Afterwards it holds what encoding left out of this
// rank's values and of its chunk of the result. Defined in feedback.cpp.
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
