// The communicator over any c10d backend (Gloo, NCCL, ...). Not a transport: each call is one call of the
// backend's own operation, with the bytes counted and failures turned into errors that name the silent ranks.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unistd.h>

#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/lookout.h"

namespace gossamer {

class GossamerBackend;

class C10dCommunicator : public Communicator {
 public:
  // `store` (may be null) serves the roll call after a failure; `name` keys it and is equal on all ranks.
  C10dCommunicator(c10::intrusive_ptr<c10d::Backend> backend, at::Device device,
                   c10::intrusive_ptr<c10d::Store> store, std::string name);
  ~C10dCommunicator() override;

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  at::Device device() const override { return device_; }

  PendingPtr all_reduce(at::Tensor x, ReduceOp op) override;
  PendingPtr reduce_scatter(at::Tensor out, at::Tensor x) override;
  PendingPtr all_gather(at::Tensor out, at::Tensor x) override;
  PendingPtr all_to_all(at::Tensor out, at::Tensor x) override;
  PendingPtr broadcast(at::Tensor x, int source) override;
  PendingPtr exchange(const std::vector<Swap>& swaps) override;

  at::Tensor allocate(int64_t bytes) override;
  int64_t piece_bytes() const override { return piece_bytes_; }
  int64_t flight_bytes() const override { return flight_bytes_; }

  void announce_failure() noexcept override;
  std::string capture_refusal() const override;
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return backend_; }

  // Waits for a work, and gives up once another rank of the group has failed.
  void wait(c10d::Work& work);

  // Takes works that nobody will wait for, such as those behind one that has failed.
  void leave(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  // Throws PythonError(comm) for an operation that the backend refused or lost.
  [[noreturn]] void fail(const char* operation, int64_t bytes, const std::exception& error);

 private:
  // Says which ranks do not answer, by the store and not by the broken backend. Waits a few seconds at most.
  std::string roll_call();

  template <class Post>
  PendingPtr rows(const char* operation, int64_t bytes, at::Tensor out, at::Tensor x, int64_t own_rows,
                  const Post& post);
  void decide_on_pieces();
  template <class Start>
  PendingPtr start(const char* operation, int64_t bytes, int64_t bytes_to_peers, Start&& start,
                   std::function<void()> finish = {}, std::optional<int64_t> bytes_from_peers = {});
  PendingPtr sum_and_take_own(at::Tensor out, const at::Tensor& x);
  std::string key(const std::string& leaf) const;
  void require(const at::Tensor& x, const char* operation) const;
  bool leaves_unfinished() const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  at::Device device_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  GossamerBackend* shared_memory_;  // backend_ if it is one; else null
  bool gloo_;
  bool async_;  // false where an operation costs less than handing it to another thread
  std::atomic<bool> gave_up_{false};
  int long_rows_ = 0;  // operations with them so far, see rows()
  double seconds_per_byte_ = std::numeric_limits<double>::infinity();  // the best of those
  int64_t piece_bytes_ = 0;                                            // 0: whole
  int64_t flight_bytes_ = 0;
  std::once_flag looking_;
  std::unique_ptr<Lookout> lookout_;  // for waits for single messages
  std::mutex left_mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> left_;
  pid_t owner_ = getpid();
};

}  // namespace gossamer
