// The ranks of a group that share a host, and their rounds. A round is: write into my segment, meet(), read the others'
// segments. Each rank has two segments, used in turn, so one meet() for each round is enough: before a rank writes into a
// segment again, it has met every rank that was reading it. Every collective is a loop of rounds (all_reduce.cpp, ...). Not
// thread-safe, except abort() and what mailbox.h uses: the backend runs one collective of a group at a time. Ranks are
// local ones here, numbered as in hosts()[host()].
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "shm/meet.h"
#include "shm/region.h"

namespace gossamer::shm {

class Group {
 public:
  explicit Group(Meeting meeting);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return layout_.size; }
  // The number that messages show for a peer: its rank in the group, or the name that name_ranks() has given it.
  int global_rank(int peer) const {
    const int rank = slot(peer).rank;
    return names_.empty() ? rank : names_.at(static_cast<size_t>(rank));
  }
  // For a subgroup: sets each rank's number in the parent group. To be called before anything else.
  void name_ranks(std::vector<int> names) { names_ = std::move(names); }
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int host() const { return host_; }

  // ---- rounds
  // Begins an operation: posts `call` for the first round. Throws if the group is broken.
  void begin(const Call& call, Deadline deadline);
  // How much of a segment the collectives fill in one round.
  static constexpr int64_t round_bytes() { return kSegmentBytes; }
  uint8_t* mine() { return segment(rank_, round_ & 1); }  // this rank writes it in this round
  // The peer's segment of the round that ended.
  const uint8_t* theirs(int peer) const { return segment(peer, (round_ + 1) & 1); }
  void meet();  // throws Error(comm) if a peer ends, fails, or does not come before the deadline
  // After the first meet(): compares the ranks' calls. Throws Error(config) on all ranks alike if they differ.
  void compare();
  const Call& call_of(int peer) const { return slot(peer).calls[(round_ + 1) & 1]; }

  // Replaces an operation that this rank cannot begin. All ranks throw, and the group goes on.
  void refuse(const std::string& reason, Deadline deadline);

  // This rank has found that the call of this number, of the group over all hosts, differs between hosts. Ranks that meet
  // afterwards read the last such number of each peer.
  void mark_different(uint64_t number) { slot(rank_).different.store(number); }
  uint64_t found_different(int peer) const { return slot(peer).different.load(); }

  // Tells the others that this rank takes part in nothing any more.
  void leave();

  // Ends what this rank waits for, now and later; any thread.
  void abort(const std::string& reason);

  // Gives one descriptor of each rank, of memory of `bytes`, to all ranks; returns them in rank order.
  std::vector<Fd> share(int fd, int64_t bytes, Deadline deadline);

  // ---- for the mailbox
  uint8_t* mail() const { return region_.data() + layout_.mail; }
  Slot& slot(int local) const { return *reinterpret_cast<Slot*>(region_.data() + layout_.slot(local)); }
  bool may_spin() const { return spin_; }
  bool aborted() const { return aborted_.load(std::memory_order_relaxed); }
  // Why nothing more can come from a peer: it has ended, left or failed, or this rank was aborted. Empty if it can.
  std::string trouble(int peer) const;
  // Whether a rank has failed, or ended without leaving first.
  bool has_failed() const;

  // Bytes of shared memory of this host's ranks, whether touched or not.
  int64_t memory_bytes() const { return layout_.bytes; }

 private:
  uint8_t* segment(int local, uint64_t parity) const {
    return region_.data() + layout_.segment(local, static_cast<int>(parity));
  }
  Header& header() const { return *reinterpret_cast<Header*>(region_.data()); }
  bool wait_for(uint32_t generation);
  bool needed_core() const;
  void check_peers(uint32_t generation);
  // `told`: the reason for the other ranks, who repeat it unchanged if it begins with "rank ".
  [[noreturn]] void break_with(const std::string& reason, const std::string& told);
  std::string missing() const;
  bool has_ended(int peer) const;
  void fail(const std::string& reason);
  void set_presence(int local, Presence presence);
  void unwatch();

  Mapping region_;
  Layout layout_;
  int rank_;
  std::vector<std::vector<int>> hosts_;
  int host_;
  std::vector<Socket> sockets_;
  std::vector<int> names_;
  std::vector<uint64_t> watches_;
  bool spin_;
  uint64_t round_ = 0;
  Call call_;
  Deadline deadline_;
  Clock::duration allowed_{};
  std::string broken_;  // why; empty while the group works
  std::atomic<bool> aborted_{false};
  mutable std::mutex reason_mutex_;
  std::string abort_reason_;
};

// Whether two ranks mean the same operation.
bool alike(const Call& a, const Call& b);

// "all_reduce of 1024 float32 (SUM)", for messages.
std::string describe(const Call& call);

// The error of ranks that do not mean the same operation.
std::string describe_difference(const Call& one, int rank_of_one, const Call& two, int rank_of_two);

}  // namespace gossamer::shm
