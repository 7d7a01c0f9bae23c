// Messages of a negotiation over a c10d backend's send and recv, for ranks on several hosts, with Gloo. A thread for each
// peer receives (rank 0 has all others, another rank only rank 0). The reason: such a receive cannot be woken, and a
// receive from any peer would not notice that one of them has died. The worker thread waits for the queue that these
// threads fill. The backend carries nothing else, and its timeout must be longer than any silence.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "negotiate/transport.h"

namespace gossamer::named {

class C10dTransport : public negotiate::Transport {
 public:
  // `lost` is called once, on a receiving thread, when a peer is lost: the worker may be blocked and not notice it.
  C10dTransport(c10::intrusive_ptr<c10d::Backend> backend, std::function<void()> lost);
  ~C10dTransport() override;

  void send(int to, const negotiate::Bytes& message) override;
  bool receive(negotiate::Received& received, negotiate::Clock::time_point deadline) override;
  void wake() noexcept override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  struct Sent {
    at::Tensor memory;
    Work work;
  };

  struct Reader {
    int from;
    Work receiving;
    std::thread thread;
  };

  void run(Reader& reader);
  bool next(Reader& reader, negotiate::Received& received);
  void wait(Reader& reader, at::Tensor memory, int tag);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::function<void()> lost_;
  const pid_t owner_;
  std::deque<Sent> sent_;  // the worker's

  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<negotiate::Received> mail_;
  bool woken_ = false;
  bool closing_ = false;
  std::exception_ptr failure_;
  std::deque<Reader> readers_;
};

}  // namespace gossamer::named
