// Operations matched by name over the ranks of a process set. In whatever order ranks submit them, all ranks execute the
// same operations together, in one order. Each rank has one thread for each process set. A rank sends what its user submits
// at once, in one message to rank 0. Rank 0 decides which operations all ranks have submitted, and every rank carries out
// its decisions. A rank with nothing to submit sleeps in Transport::receive; only the stall inspection runs by the clock.
//
// An error of one operation fails that operation on every rank. An error of a rank, its transport or its executor ends the
// negotiation on every rank, with the reason: everything pending fails, and later calls throw.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "negotiate/coordinator.h"
#include "negotiate/stall.h"
#include "negotiate/transport.h"

namespace gossamer::negotiate {

struct Operation {
  Request request;
  std::shared_ptr<void> payload;            // the executor's
  std::function<void(const Result&)> done;  // once, on the worker thread; short. May submit. Must not throw
  int32_t slot = -1;                        // the negotiator's: the slot of the bit that was sent for it
  uint64_t waits = 0;                       // the negotiator's: this rank's waits before it was submitted
};

// One operation of a batch. `operation` is null where this rank has joined: it takes part with zeros.
struct Part {
  std::shared_ptr<const Response> response;
  std::shared_ptr<Operation> operation;
};

// Runs a batch on the worker thread, in the order of the parts. All ranks get the same batches in the same order. May block.
// Afterwards `done` is called for each part, unless the executor moved it away to call it later. Error(config) fails only
// the batch: throw it only for errors that all ranks have alike. Any other exception ends the negotiation.
using Execute = std::function<void(const std::vector<Part>&)>;

enum class Phase { submitted, rank_ready, agreed, executing, done };
struct Moment {
  Phase phase;
  const std::string& name;
  int rank;  // rank_ready, on rank 0: the rank that submitted it. Elsewhere: this rank
  Clock::time_point time;
};

struct Options {
  std::vector<int> ranks;  // numbers that messages show, one a rank of the set; empty: counted from 0
  Fusing fusing;           // rank 0's values of this and the next are used
  int cache_capacity = 1024;
  StallOptions stall;
  std::chrono::microseconds window{50};  // a burst is taken to be over after this, see hold(); 0: no waiting
  double leave_s = 30;                   // how long shutdown() waits for rank 0
  std::function<void(const Moment&)> trace;  // from any thread; null costs nothing
};

struct Statistics {
  uint64_t submitted = 0;  // operations
  uint64_t cached = 0;     // of those, sent as a bit
  uint64_t messages = 0;   // sent
  uint64_t message_bytes = 0;
  uint64_t decisions = 0;
  uint64_t batches = 0;  // given to the executor
};

class Negotiator {
 public:
  Negotiator(int rank, int size, std::unique_ptr<Transport> transport, Execute execute, Options options);
  ~Negotiator();  // shuts down; not on the worker thread
  Negotiator(const Negotiator&) = delete;
  Negotiator& operator=(const Negotiator&) = delete;

  // Any thread. An empty name becomes <kind>.noname.<era>.<number>. The number counts the unnamed operations of that kind
  // since this rank's last barrier or join; the era counts barriers and joins. So a rank that skipped an operation matches
  // again after the next barrier.
  // Throws Error(config), and changes nothing, for a name that is in flight, and for a name submitted since the last wait: so
  // the result does not depend on how fast the first one was. Throws Error(config) for a request that cannot work; the operation then fails
  // on the other ranks too, once they submit it, and this rank's next one of that name waits for that. Throws Error(comm)
  // once the negotiation has ended.
  void submit(Operation operation);
  // The same for several operations that complete or fail together. An empty group name is numbered as above.
  void submit_group(std::vector<Operation> operations, std::string group);
  // Says that this rank cannot take part, for the caller's reason: the operation fails on all ranks, and still counts.
  void refuse(Request request, const std::string& reason);

  // A thread waits, so the burst is over: what was submitted is negotiated now. Any thread.
  void hurry();

  // This rank has seen the end of some operation. Names of complete operations submitted before are free now.
  void waited() { ++waits_; }

  // Ends the negotiation on all ranks. Agreed operations are executed; waiting ones fail. Idempotent.
  void shutdown();

  Statistics statistics() const;

 private:
  using Flight = std::shared_ptr<Operation>;

  void enqueue(std::vector<Operation> operations, const std::string& group);
  void require_free(const std::vector<Operation>& operations, bool& must_wait) const;
  void require_waited(const Request& request) const;
  void keep_until_waited(const Operation& operation);
  void give_name(Request& request);
  bool release_deferred();
  void run() noexcept;
  void step();
  void handle(Received received);
  Clock::time_point until();
  void collect();
  bool hold(size_t queued, Clock::time_point now);
  void announce(const std::vector<Flight>& flights);
  void send(int to, const Message& message);
  void lead();
  void leave();
  void apply(Decision decision);
  Part resolve(std::shared_ptr<const Response> response, bool changes_cache);
  void execute(const std::vector<Part>& parts);
  void complete(const Part& part, const std::string& error);
  void end(std::string reason, bool tell) noexcept;
  void trace(Phase phase, const std::string& name, int rank) const;
  std::string self() const { return "rank " + std::to_string(ranks_[rank_]); }

  const int rank_;
  const int size_;
  const pid_t owner_;
  const Options options_;
  std::vector<int> ranks_;
  std::unique_ptr<Transport> transport_;
  Execute execute_;

  // ---- shared with the threads that submit
  mutable std::mutex mutex_;
  std::vector<Flight> queue_;
  std::unordered_map<std::string, Flight> in_flight_;
  std::vector<std::vector<Flight>> deferred_;              // wait for refused ones of the same names
  std::atomic<uint64_t> waits_{0};                         // waits of this rank that have ended
  std::unordered_map<std::string, std::string> unwaited_;  // names of complete operations, with call sites
  uint64_t unwaited_since_ = 0;                            // they were submitted after so many waits
  size_t wake_at_ = 1;                                     // queued operations that wake the worker
  std::string ended_;                                      // why
  bool stopping_ = false;
  bool hurries_ = false;
  int64_t era_ = 0;
  std::unordered_map<std::string, int64_t> unnamed_;  // of this era, by kind
  struct {
    std::atomic<uint64_t> submitted{0}, cached{0}, messages{0}, message_bytes{0}, decisions{0}, batches{0};
  } counters_;

  // ---- the worker's
  std::unique_ptr<Coordinator> coordinator_;  // on rank 0
  StallInspector inspector_;
  Cache cache_;
  uint64_t seen_ = 0;                // decisions carried out
  std::vector<Flight> bit_flights_;  // by slot: the operation whose bit is on its way
  std::string stop_;                 // why rank 0 ends the negotiation after the present step
  bool running_ = true;
  Clock::time_point leave_by_ = Clock::time_point::max();
  size_t burst_ = 0;     // operations submitted since nothing was in flight
  size_t expected_ = 1;  // the size of the previous burst
  // Queued when the window opened, and when last looked at; 0: no window is open.
  size_t window_first_ = 0, window_seen_ = 0;
  Clock::time_point window_opened_, window_end_;
  int skip_windows_ = 0;

  std::mutex joining_;
  std::thread thread_;
};

}  // namespace gossamer::negotiate
