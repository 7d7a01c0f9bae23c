// The collectives of a group whose ranks are on several hosts: shared memory inside a host, Gloo between hosts. Sums go in
// rank order inside each host, then in the order of the hosts. In all_reduce every rank of a host carries a share of what
// crosses the network. Not used where all ranks share a host. Ranks are numbered as in the whole group.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backend/across.h"
#include "shm/collectives.h"

namespace gossamer {

class Hosts {
 public:
  // `local`: the ranks of this host. `gloo`: all ranks; while this object lives, only it may run collectives of `gloo`.
  Hosts(shm::Group& local, c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
        int rank, int size);
  ~Hosts();

  // As in shm/collectives.h, with ranks of the whole group and parts of equal size.
  void all_reduce(void* data, int64_t count, const shm::Summing& summing, shm::Deadline deadline);
  void reduce(void* data, int64_t count, const shm::Summing& summing, int root, shm::Deadline deadline);
  void reduce_scatter(const void* const* ins, void* out, int64_t count, const shm::Summing& summing,
                      shm::Deadline deadline);
  void broadcast(void* data, int64_t bytes, int root, shm::Deadline deadline);
  void all_gather(const void* in, void* const* outs, int64_t bytes, shm::Deadline deadline);
  void gather(const void* in, void* const* outs, int64_t bytes, int root, shm::Deadline deadline);
  void scatter(const void* const* ins, void* out, int64_t bytes, int root, shm::Deadline deadline);
  void all_to_all(const void* const* ins, const int64_t* in_bytes, void* const* outs,
                  const int64_t* out_bytes, shm::Deadline deadline);
  void barrier(shm::Deadline deadline);
  void agree(const shm::Call& call, shm::Deadline deadline);
  void agree_on_count(int64_t count, shm::Deadline deadline);
  // Begins an operation that is none of this class's: see enter().
  CallAcross begin(const shm::Call& call, shm::Deadline deadline);
  // This rank has failed: ends what the ranks of all hosts wait for. Any thread.
  void announce(const std::string& reason) noexcept;
  // This rank refuses its call; the ranks of all hosts throw.
  void refuse(const std::string& reason, shm::Deadline deadline);

 private:
  struct Part {
    void* data;
    int64_t bytes;
    int peer;
  };
  // Parts for one peer arrive in the order in which they were sent. Throws CallsDiffer.
  void transfer(const std::vector<Part>& sends, const std::vector<Part>& receives, CallAcross& call);
  using Buffers = std::vector<at::Tensor>;  // bytes for each rank; undefined where nothing moves
  void exchange(const Buffers& out, const Buffers& in, int tag, CallAcross& call);
  // The ranks of all hosts compare what they are about to do, as they must where some need no data of others. All throw alike
  // if the calls differ.
  CallAcross compare(const shm::Call& call, shm::Deadline deadline, const std::string& refusal = {});
  // Begins a call in which every rank needs data of every other. Only the ranks of each host compare it; those that wait for
  // messages find out whether hosts differ. A call that moves nothing is compared.
  CallAcross enter(const shm::Call& call, shm::Deadline deadline);
  // The ranks of this host compare it. Returns why they refuse it; empty if they do not.
  std::string compare_here(const shm::Call& call, shm::Deadline deadline, const std::string& refusal);
  struct Entry;
  // After an error that others may not see: writes the reason into the store, where all ranks look while they wait.
  [[noreturn]] void fail(std::string reason);
  // Runs an operation; an Error(comm) in it becomes an error on all ranks.
  void run(const std::function<void()>& body);
  // `across` moves data between hosts, `inside` this one: a collective of local_. If `across` finds that calls differ, all
  // ranks of this host throw, also those that have nothing to wait for in it.
  void finish(CallAcross& call, shm::Deadline deadline, const std::function<void()>& across,
              const std::function<void()>& inside);
  void reduce_across(void* data, int64_t count, const shm::Summing& summing, CallAcross& call,
                     shm::Deadline deadline);

  const std::vector<int>& ranks_of(int host) const { return local_.hosts()[host]; }
  int host_count() const { return static_cast<int>(local_.hosts().size()); }
  // The rank of `host` that exchanges data with the `index`th rank of another host.
  int carrier(int host, int index) const { return ranks_of(host)[index % ranks_of(host).size()]; }

  shm::Group& local_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  CallAcross::Place place_;
  uint64_t number_ = 0;  // of the last call
  // Messages that nobody has taken: calls differed.
  std::vector<c10::intrusive_ptr<c10d::Work>> left_;
  std::vector<int> host_of_;   // by rank
  std::vector<int> place_of_;  // in its host, by rank
  bool gave_up_ = false;
};

}  // namespace gossamer
