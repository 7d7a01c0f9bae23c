// The backend "gossamer" with a codec: sums and gathers of floats go through the two-shot collectives, over connections of
// their own; everything else is GossamerBackend's. Whatever calls c10d is compressed by it: DDP, FSDP2, tensor parallelism.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "encoded/options.h"
#include "route/scratch.h"

namespace gossamer {

class CodecBackend : public GossamerBackend {
 public:
  struct Ranks {
    c10::intrusive_ptr<c10d::Store> store;  // nothing else uses it
    int rank;
    int size;
    std::chrono::milliseconds timeout;
  };
  // Makes the connections that encoded rows travel on. Collective.
  using Connect = std::function<CommunicatorPtr(const Ranks& ranks, const CodecOptions& options)>;

  CodecBackend(const Ranks& ranks, const c10::intrusive_ptr<CodecOptions>& options, Connect connect);
  ~CodecBackend() override;

  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void announce(const std::string& text) override;

  // The connections of encoded rows, with their counters of bytes.
  const CommunicatorPtr& comm() const { return comm_; }

 protected:
  void all_reduce(const Flat& flat, const shm::Summing& summing, shm::Deadline deadline) override;
  void all_gather(const Flat& in, const std::vector<void*>& outs, shm::Deadline deadline) override;
  void reduce_scatter(const std::vector<void*>& ins, const Flat& out, const shm::Summing& summing,
                      shm::Deadline deadline) override;
  // The part has the codecs of `options` if these are CodecOptions, else this group's.
  c10::intrusive_ptr<Backend> make_part(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                        const c10::intrusive_ptr<Options>& options) override;

 private:
  // Whether a tensor of this type and size goes through a codec.
  bool encodes(const std::optional<CodecChoice>& codec, const Flat& x, int64_t bytes) const;
  bool encodes(const shm::Summing& summing, const Flat& x, int64_t bytes) const;
  // Runs an encoded operation once all ranks have said in the group itself that they are about to do the same.
  template <class Run>
  void run(const shm::Call& call, shm::Deadline deadline, Run&& run);

  c10::intrusive_ptr<CodecOptions> options_;
  Connect connect_;
  CommunicatorPtr comm_;
  Scratch scratch_;
  uint64_t calls_ = 0;  // encoded ones: the nonce of stochastic codecs
};

}  // namespace gossamer
