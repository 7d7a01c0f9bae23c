// Messages of a negotiation between ranks of one host. Each sender has a ring in shared memory; each rank has a doorbell,
// on which its worker thread sleeps. No thread of its own. It uses the memory of a backend "gossamer" and that backend's
// watch over peers, but none of its operations after construction, so the backend may run collectives meanwhile.
#pragma once

#include <deque>

#include "backend/backend.h"
#include "negotiate/transport.h"

namespace gossamer::named {

class HostTransport : public negotiate::Transport {
 public:
  // Collective over the backend's ranks, which share one host.
  explicit HostTransport(c10::intrusive_ptr<GossamerBackend> backend);
  ~HostTransport() override;

  void send(int to, const negotiate::Bytes& message) override;
  bool receive(negotiate::Received& received, negotiate::Clock::time_point deadline) override;
  void wake() noexcept override;

 private:
  struct Bell {  // at the beginning of a rank's own memory
    alignas(shm::kLine) std::atomic<uint32_t> rung;
    alignas(shm::kLine) std::atomic<uint32_t> dozing;  // the worker thread sleeps on it, or is about to
  };
  struct Peer {
    shm::Ring in, out;
    std::deque<negotiate::Bytes> waiting;  // did not fit into `out`
    size_t written = 0;                    // of the first of them
    negotiate::Bytes partial;              // the received part of a message
  };

  Bell& bell(int rank) const { return *reinterpret_cast<Bell*>(shared_->bases()[rank]); }
  void ring(int rank) const;
  bool push(int rank, Peer& peer);
  bool take(int rank, Peer& peer, negotiate::Received& received);
  bool news();
  void doze(negotiate::Clock::time_point until, bool blocked);
  void require_peers() const;

  c10::intrusive_ptr<GossamerBackend> backend_;
  std::shared_ptr<shm::Shared> shared_;
  int rank_;
  std::vector<std::pair<int, Peer>> peers_;  // rank 0: all others; elsewhere: rank 0
  size_t next_ = 0;                          // whose ring is read first; it changes, so that no peer starves
  std::atomic<bool> woken_{false};
};

}  // namespace gossamer::named
