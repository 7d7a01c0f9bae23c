// Messages between the ranks of one host, with tags: c10d's send, recv and recv from any source. Sizes need not be agreed
// on before, any mixture of messages goes at once, and no message blocks one with another tag. Each rank of a group has
// one, made when first needed; peers may make theirs later, or never. Not a collective, and not for ranks on other hosts.
// mailbox.cpp: the thread, deadlines and lost peers; mail_flow.cpp: matching and moving.
//
// A message is offered to the receiver, which keeps a list of offers. It goes in parts once a receive was posted for it: so
// the ring holds only data that has a destination, and nothing in it waits for the user. A small message goes with its
// offer; `kWholeMessages` bounds how many of those the receiver keeps. A send is done when it is matched and its last byte
// is in shared memory: as with Gloo and NCCL, a send without a receive waits.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shm/group.h"
#include "shm/mail_layout.h"

namespace gossamer::shm {

class Mailbox {
 public:
  // Called exactly once for each operation, from the mailbox's thread, with no lock held. It may post more, must be short,
  // must not throw and must not destroy the mailbox. `source` is the message's sender, or -1 where a receive from any
  // source failed before a message was found.
  using Done = std::function<void(int source, std::exception_ptr error)>;

  explicit Mailbox(Group& group);  // the group must outlive it
  // Pending operations fail. A small message that was already sent stays in shared memory for its receiver.
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Any thread. Ranks are local ones; the caller's own is allowed. The memory must stay until `done`. Messages of one sender
  // with one tag are matched in order. If the sizes differ both sides fail, and the next pair is matched as usual. A timeout
  // withdraws the operation, with the same effect; but a receive can still match a send that timed out until the peer
  // learns of it.
  void send(int to, uint64_t tag, const void* data, int64_t bytes, Deadline deadline, Done done);
  void receive(int from, uint64_t tag, void* data, int64_t bytes, Deadline deadline,
               Done done);  // from -1: any

 private:
  struct Operation {
    bool sends;
    int peer;  // -1: any, until matched
    uint64_t tag;
    uint8_t* data;
    int64_t bytes;
    Deadline deadline;
    Clock::duration allowed;
    Done done;
    int64_t moved = 0;
    bool whole = false;  // a send that went with its offer
  };
  using Operations = std::map<uint64_t, Operation>;  // in the order of their numbers

  struct Peer {
    Peer(Ring in, Ring out) : in(in), out(out) {}
    Ring in, out;
    std::string gone;           // why nothing can go to or from it
    std::deque<Frame> answers;  // answers to its offers; they go out first
    uint64_t next_id = 1;
    uint64_t next_offer = 1;       // sends from this id on are not offered yet
    Operations sends;              // by id
    std::deque<uint64_t> granted;  // ids of granted sends
    int whole_messages = 0;        // sent and not answered yet
    Operations receiving;          // granted, by the peer's id
  };
  struct Arrival {  // a message without a posted receive
    int source;
    Frame frame;
    std::vector<uint8_t> payload;
  };
  struct Finished {
    Done done;
    int source;
    std::exception_ptr error;
  };

  // mailbox.cpp
  void run();
  bool pass();
  bool serve(int index, const std::string& own_trouble);
  bool deliver();
  void close();
  bool spin(uint64_t seen) const;
  void doze(uint64_t seen);
  uint64_t signs() const;
  void nudge();
  void rouse(int index);
  void posted(Deadline deadline);
  std::string own_trouble() const;
  void bury(int index, const std::string& why);
  void fail(Operations& operations, const std::string& why,
            const std::function<bool(const Operation&)>& which);
  void expire(Deadline now);
  void expire(Operations& operations, Deadline now, const std::function<void(uint64_t)>& withdraw);
  void finish(Operation& operation, std::exception_ptr error = nullptr);
  std::string describe(const Operation& operation) const;

  // mail_flow.cpp
  bool drain(int index);
  void handle(int source, const Frame& frame, const Ring& ring);
  void arrive(int source, const Frame& frame, const Ring& ring);
  bool match_arrived(Operation& receive);
  template <class Copy>
  void pair(Operation receive, int source, const Frame& offer, const Copy& copy_to);
  void take_part(Peer& peer, const Frame& frame, const Ring& ring);
  void cancelled(int source, uint64_t id);
  void answered(int index, const Frame& frame);
  void answer(int index, FrameKind kind, uint64_t id, int64_t bytes = 0);
  void forget_send(Peer& peer, uint64_t id);
  bool push(int index);
  bool write_next(Peer& peer);
  std::exception_ptr mismatch(int source, int target, uint64_t tag, int64_t sent, int64_t expected) const;

  Group& group_;
  std::mutex mutex_;  // guards all that follows, except the rings' counters, which signs() reads without it
  std::vector<Peer> peers_;
  Operations posted_;  // receives without a message
  uint64_t next_receive_ = 1;
  std::list<Arrival> arrived_;  // messages without a receive, in order of arrival
  std::string any_gone_;        // why a receive from any source may wait in vain
  std::vector<Finished> finished_;
  int64_t open_ = 0;  // operations posted and not finished
  Deadline next_deadline_ = Deadline::max();
  Deadline wake_at_{};  // when the thread looks again by itself
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

}  // namespace gossamer::shm
