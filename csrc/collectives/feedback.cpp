// The two-shot all-reduce with error feedback: what a codec leaves out is added to the next call. See two_shot.h.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "collectives/hops.h"
#include "collectives/two_shot.h"
#include "device_kernels.h"

namespace gossamer {
namespace two_shot {
namespace {

// A NaN or Inf has been seen by everyone; kept, it would come back in every later step.
void forget_what_is_not_finite(at::Tensor error) { error.nan_to_num_(0.0, 0.0, 0.0); }

}  // namespace

void all_reduce_with_error(Communicator& comm, const CodecChoice& codec, at::Tensor x, double scale,
                           Scratch& scratch, uint64_t nonce, at::Tensor error) {
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  const auto& kernels = device_kernels(x.device().type());
  const int64_t n = comm.size();
  const int64_t numel = x.numel();
  if (numel == 0) return;
  if (n == 1) return kernels.scale(to_dtype(x.scalar_type(), "all_reduce"), x.data_ptr(), numel, scale);

  auto spec = codec.spec(error.scalar_type());  // wide all the way: no rounding that the error does not see
  const int64_t chunk = chunk_numel(numel, n, spec.block);
  const int64_t row_bytes = codec::row_bytes(spec, chunk);
  const int64_t begin = std::min(comm.rank() * chunk, numel);
  const int64_t valid = std::clamp<int64_t>(numel - begin, 0, chunk);
  const codec::Rows rows{n, chunk, numel};
  Hops hops(comm, scratch, x.device(), row_bytes);
  const at::Tensor left_out = error.view({numel});
  const at::Tensor decoded = at::empty_like(left_out);

  left_out.add_(x.view({numel}));  // what this rank owes
  spec.key = codec.key(nonce, Phase::first, comm.rank());
  kernels.encode(spec, spec.dtype, left_out.data_ptr(), rows, hops.send());
  kernels.decode(spec, hops.send(), rows, decoded.data_ptr());
  left_out.sub_(decoded);
  const codec::WireRows received = hops.swap();

  const at::Tensor sum = at::zeros({chunk}, left_out.options());
  kernels.decode_add(spec, received, n, chunk, valid, sum.data_ptr());
  kernels.scale(spec.dtype, sum.data_ptr(), valid, scale);
  spec.key = codec.key(nonce, Phase::reduced, comm.rank());
  kernels.encode(spec, spec.dtype, sum.data_ptr(), {1, chunk, valid}, hops.own());
  if (valid > 0) {
    // What the second encoding loses of the result joins what this rank has left out of its own part of the sum.
    const at::Tensor mine = left_out.narrow(0, begin, valid);
    const at::Tensor result = decoded.narrow(0, begin, valid);
    kernels.decode(spec, hops.own(), {1, chunk, valid}, result.data_ptr());
    mine.add_(sum.narrow(0, 0, valid).sub_(result), 1.0 / scale);
  }
  forget_what_is_not_finite(left_out);
  kernels.decode(spec, hops.gather(), rows, decoded.data_ptr());
  x.view({numel}).copy_(decoded);
}

}  // namespace two_shot
}  // namespace gossamer
