// See backend.h of this folder. The functions that override run in the queue, one at a time.
#include "encoded/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

#include "comm/by_hosts.h"
#include "errors.h"
#include "float_dtype.h"
#include "shm/pieces.h"

namespace gossamer {
namespace {

// The parts as one tensor of `like`'s dtype: in place if they lie one after the other, else `copied`.
at::Tensor joined(const std::vector<void*>& parts, const at::Tensor& like, bool copied) {
  const int64_t count = static_cast<int64_t>(parts.size());
  const int64_t bytes = static_cast<int64_t>(like.nbytes());
  bool consecutive = true;
  for (int64_t i = 0; i < count; ++i) {
    consecutive = consecutive && parts[static_cast<size_t>(i)] == static_cast<uint8_t*>(parts[0]) + i * bytes;
  }
  if (consecutive) return at::from_blob(parts[0], {count * like.numel()}, like.options());
  at::Tensor whole = at::empty({count * like.numel()}, like.options());
  for (int64_t i = 0; copied && i < count; ++i) {
    shm::copy(bytes_of(whole) + i * bytes, parts[static_cast<size_t>(i)], bytes);
  }
  return whole;
}

double scale_of(const shm::Summing& summing) { return 1.0 / static_cast<double>(summing.reduction.divisor); }

}  // namespace

CodecBackend::CodecBackend(const Ranks& ranks, const c10::intrusive_ptr<CodecOptions>& options,
                           Connect connect)
    : GossamerBackend(ranks.store, ranks.rank, ranks.size, ranks.timeout, options->text),
      options_(c10::make_intrusive<CodecOptions>(*options)),
      connect_(std::move(connect)),
      ranks_(ranks) {
  options_->timeout = ranks.timeout;
  Ranks own = ranks;
  own.store = c10::make_intrusive<c10d::PrefixStore>("codec", ranks.store);
  comm_ = connect_(own, *options_, at::kCPU);
}

CodecBackend::~CodecBackend() {
  if (close()) return;
  new CommunicatorPtr(std::move(comm_));  // its threads are not in this process
  on_device_.release();
}

void CodecBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  GossamerBackend::setTimeout(timeout);
  comm_->set_timeout(timeout);
  if (const auto comm = device_comm()) comm->set_timeout(timeout);
}

c10::intrusive_ptr<GossamerBackend> CodecBackend::make_part(const c10::intrusive_ptr<c10d::Store>& store,
                                                            int rank, int size,
                                                            const c10::intrusive_ptr<Options>& options) {
  const auto* given = dynamic_cast<CodecOptions*>(options.get());
  auto own = c10::make_intrusive<CodecOptions>(given ? *given : *options_);
  if (!given) own->hosts.reset();  // they name ranks of this group
  const auto timeout = options ? options->timeout : options_->timeout;
  return c10::make_intrusive<CodecBackend>(Ranks{store, rank, size, timeout}, std::move(own), connect_);
}

void CodecBackend::announce(const std::string& text) {
  GossamerBackend::announce(text);
  if (comm_) comm_->tell(text);
  if (const auto comm = device_comm()) comm->tell(text);
}

bool CodecBackend::encodes(const std::optional<CodecChoice>& codec, const Flat& x, int64_t bytes) const {
  return codec && bytes >= options_->min_bytes && !x.of_complex() && float_dtype(x.tensor().scalar_type());
}

bool CodecBackend::encodes(const shm::Summing& summing, const Flat& x, int64_t bytes) const {
  const auto op = summing.reduction.op;
  const bool sum = op == shm::Op::sum || op == shm::Op::avg || op == shm::Op::premul_sum;
  return sum && encodes(options_->codec, x, bytes);
}

Communicator& CodecBackend::one_level() const {
  ByHosts* hosts = comm_->by_hosts();
  return hosts == nullptr ? *comm_ : *hosts->world();
}

template <class Run>
void CodecBackend::run(Communicator& comm, const shm::Call& call, shm::Deadline deadline, Run&& run) {
  std::optional<CallAcross> across;
  if (comm.takes_calls()) {
    across = enter(call, deadline);
  } else {
    agree(call, deadline);
  }
  // This thread does not have the caller's inference mode.
  const at::AutoDispatchBelowADInplaceOrView below;
  comm.set_call(across ? &*across : nullptr);
  const auto reset = c10::make_scope_exit([&comm] { comm.set_call(nullptr); });
  try {
    run(calls_);
    ++calls_;
  } catch (const CallsDiffer& error) {
    scratch_ = Scratch();  // messages of this call may still come
    raise_python(ErrorKind::config, error.what());
  } catch (const std::exception& error) {
    announce(first_line(error.what()));  // nobody shall wait for this rank, in either kind of operation
    throw;
  }
}

void CodecBackend::all_reduce(const Flat& flat, const shm::Summing& summing, shm::Deadline deadline) {
  const at::Tensor& x = flat.tensor();
  if (!encodes(summing, flat, flat.bytes())) return GossamerBackend::all_reduce(flat, summing, deadline);
  run(*comm_, shm::call_for(shm::CallKind::all_reduce, x.numel(), summing), deadline, [&](uint64_t nonce) {
    if (summing.factor != 1) at::Tensor(x).mul_(summing.factor);  // of PREMUL_SUM; each rank has its own
    two_shot::all_reduce(*comm_, *options_->codec, x.view({-1}), scale_of(summing), scratch_, nonce);
  });
}

void CodecBackend::reduce_scatter(const std::vector<void*>& ins, const Flat& out, const shm::Summing& summing,
                                  shm::Deadline deadline) {
  const at::Tensor& part = out.tensor();
  if (!encodes(summing, out, out.bytes() * getSize()))
    return GossamerBackend::reduce_scatter(ins, out, summing, deadline);
  Communicator& comm = one_level();
  run(comm, shm::call_for(shm::CallKind::reduce_scatter, part.numel(), summing), deadline,
      [&](uint64_t nonce) {
        at::Tensor whole = joined(ins, part, /*copied=*/true);
        if (summing.factor != 1) whole = whole.mul(summing.factor);
        two_shot::reduce_scatter(comm, *options_->codec, part.view({-1}), whole, scale_of(summing), scratch_,
                                 nonce);
      });
}

void CodecBackend::all_gather(const Flat& in, const std::vector<void*>& outs, shm::Deadline deadline) {
  const at::Tensor& part = in.tensor();
  if (!encodes(options_->gather_codec, in, in.bytes() * getSize()))
    return GossamerBackend::all_gather(in, outs, deadline);
  Communicator& comm = one_level();
  run(comm, shm::call_for(shm::CallKind::all_gather, in.bytes()), deadline, [&](uint64_t nonce) {
    const at::Tensor whole = joined(outs, part, /*copied=*/false);
    two_shot::all_gather(comm, *options_->gather_codec, whole, part.view({-1}), scratch_, nonce);
    for (size_t i = 0; whole.data_ptr() != outs[0] && i < outs.size(); ++i) {
      shm::copy(outs[i], bytes_of(whole) + static_cast<int64_t>(i) * in.bytes(), in.bytes());
    }
  });
}

}  // namespace gossamer
