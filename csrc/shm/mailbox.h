// Messages between the ranks of one host, with tags: c10d's send, recv and recv from any source. Sizes need
// not be agreed on before, any mixture of messages goes at once, and none blocks one with another tag. One a
// group and rank, made when first needed; peers may make theirs later, or never. Not a collective, and not
// for ranks on other hosts. mailbox.cpp: the thread, deadlines and ends; mail_flow.cpp: matching and moving.
//
// A message is offered to the receiver, which keeps a list of offers, and goes in parts once a receive was
// posted for it: so the ring holds only what has a place to go to, and nothing in it waits for the user. A
// small message goes with its offer; `kWholeMessages` bounds what the receiver keeps of those. A send is done
// when it is matched and its last byte is in shared memory: as with Gloo and NCCL, sending without a receive
// waits.
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
  // Called exactly once for each operation, from the mailbox's thread, with no lock held: it may post more,
  // must be short, must not throw and must not destroy the mailbox. `source` is the message's sender, or -1
  // where a receive from any source has failed before one was found.
  using Done = std::function<void(int source, std::exception_ptr error)>;

  explicit Mailbox(Group& group);  // which must outlive it
  // What is pending fails. What was sent whole stays in shared memory for its receiver.
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Any thread; ranks are local ones, that of the caller included. The memory must stay until `done`.
  // Messages of one sender with one tag are matched in order. If the sizes differ both sides fail, and the
  // next pair is matched as usual. So it is after a timeout, which withdraws the operation; but a send that
  // timed out can still be met by a receive until the peer hears of it.
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
    std::string gone;           // why nothing goes to or from it any more
    std::deque<Frame> answers;  // to its offers; they go out first
    uint64_t next_id = 1;
    uint64_t next_offer = 1;       // sends from this id on are not offered yet
    Operations sends;              // by id
    std::deque<uint64_t> granted;  // ids of sends
    int whole_messages = 0;        // sent and not answered yet
    Operations receiving;          // granted, by the peer's id
  };
  struct Arrival {  // that nobody has posted a receive for
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
  std::mutex mutex_;  // of all that follows, but for the rings, which are read and written by signs() too
  std::vector<Peer> peers_;
  Operations posted_;  // receives without a message
  uint64_t next_receive_ = 1;
  std::list<Arrival> arrived_;  // messages without a receive, as they came
  std::string any_gone_;        // why a receive from any source may wait in vain
  std::vector<Finished> finished_;
  int64_t open_ = 0;  // operations posted and not finished
  Deadline next_deadline_ = Deadline::max();
  Deadline wake_at_{};  // when the thread looks again by itself
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

}  // namespace gossamer::shm
