// Operations matched by name over the ranks of a process set: whatever order ranks submit them in, all ranks execute the
// same ones together, in one order. One thread a rank and process set. A rank submits when its user does, by one
// message to rank 0; rank 0 decides what all ranks have submitted, and its decisions are carried out by everybody. A
// rank with nothing to submit sleeps in Transport::receive; nothing runs by the clock but the stall inspection.
//
// What goes wrong with one operation fails that operation on every rank. What goes wrong with a rank, its transport or
// its executor ends the negotiation on every rank, with the reason: everything pending fails, later calls throw.
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
  int32_t slot = -1;                        // the negotiator's: of the bit that was sent for it
  uint64_t waits = 0;                       // the negotiator's: of this rank before it was submitted
};

// One operation of a batch. `operation` is null where this rank has joined: it takes part with zeros.
struct Part {
  std::shared_ptr<const Response> response;
  std::shared_ptr<Operation> operation;
};

// Runs a batch on the worker thread, in the order of the parts; all ranks get the same batches in the same order. May
// block. Afterwards `done` is called for each part, but where the executor took it away (moved it) to call it later.
// Error(config) fails the batch alone: throw it only for what fails on all ranks alike. Anything else ends all.
using Execute = std::function<void(const std::vector<Part>&)>;

enum class Phase { submitted, rank_ready, agreed, executing, done };
struct Moment {
  Phase phase;
  const std::string& name;
  int rank;  // rank_ready, on rank 0: who submitted it. Elsewhere: this rank
  Clock::time_point time;
};

struct Options {
  std::vector<int> ranks;  // numbers that messages show, one a rank of the set; empty: counted from 0
  Fusing fusing;           // these two: rank 0's hold
  int cache_capacity = 1024;
  StallOptions stall;
  std::chrono::microseconds window{50};  // after which a burst is thought to be over, see collect(); 0: none
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

  // Any thread. An empty name becomes <kind>.noname.<era>.<number>: numbers count the unnamed of that kind since the last
  // barrier or join that this rank submitted, eras count those; so a rank that skipped one lines up there again.
  // Throws Error(config) for a name in flight, without effect, and for one that was submitted since the last wait, so that
  // it does not depend on how fast the first was; for a request that cannot work, which then fails on the
  // other ranks too, once they submit it (a later one of that name waits for that); Error(comm) once the negotiation has ended.
  void submit(Operation operation);
  // The same, of several that complete or fail together. An empty group name is numbered as above.
  void submit_group(std::vector<Operation> operations, std::string group);
  // This rank cannot take part, for a reason that the caller found: the operation fails on all ranks, and numbers count on.
  void refuse(Request request, const std::string& reason);

  // Somebody waits, so a burst is over: what was submitted is negotiated now. Any thread.
  void hurry();

  // This rank has seen that some operation is over: what was submitted before and is complete has names that are free.
  void waited() { ++waits_; }

  // Ends the negotiation on all ranks. What is agreed on already is executed; what waits fails. Idempotent.
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
  std::vector<std::vector<Flight>> deferred_;              // behind refused ones of the same names
  std::atomic<uint64_t> waits_{0};                         // that have ended
  std::unordered_map<std::string, std::string> unwaited_;  // names of complete ones, with call sites
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
  std::vector<Flight> bit_flights_;  // by slot: what a bit is on its way for
  std::string stop_;                 // why rank 0 ends it after the present step
  bool running_ = true;
  Clock::time_point leave_by_ = Clock::time_point::max();
  size_t burst_ = 0;     // operations submitted since nothing was in flight
  size_t expected_ = 1;  // the same of the burst before
  size_t window_first_ = 0,
         window_seen_ = 0;  // queued when it opened and when last looked at; 0: none is open
  Clock::time_point window_opened_, window_end_;
  int skip_windows_ = 0;

  std::mutex joining_;
  std::thread thread_;
};

}  // namespace gossamer::negotiate
