// How the ranks of one negotiation reach each other: small messages in both directions between rank 0 and every other
// rank, none between the others. The product implements it over c10d or shared memory, tests over queues. One a process
// set: it carries nothing else. The worker thread alone calls send and receive; wake may come from any thread.
//
// Required: messages of one sender arrive in the order in which they were sent, whole, each once. A lost peer must
// become an Error(comm) that names it, from receive: at rank 0 for any rank, elsewhere for rank 0. Nothing else bounds
// the wait for a peer, since an idle one says nothing.
//
// What it costs: an operation that all ranks submit at once takes two messages in a row, member to rank 0 and back. Rank 0
// itself executes after the first, so over a blocking collective the ranks differ by one message only. A submission
// of cached operations has 17 bytes and one bit a slot, a decision of one batch of them 29 or a little more.
// To stay within 1.3 of a 4-byte all-reduce, a message must cost less than 0.15 of it: between ranks of one host that
// wants shared memory. Over TCP two messages cost about what a small all-reduce does, unless several operations are in
// flight: then they are negotiated while others execute, or together.
#pragma once

#include "negotiate/wire.h"

namespace gossamer::negotiate {

struct Received {
  int from = -1;
  Bytes message;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Returns without waiting for the receiver to receive: it may be executing, and waiting for this rank.
  virtual void send(int to, const Bytes& message) = 0;

  // The next message from any rank. False once `deadline` has passed (one in the past only looks) or after wake().
  virtual bool receive(Received& received, Clock::time_point deadline) = 0;

  // Ends the present receive(), or the next one if there is none. Must not block, and must not throw.
  virtual void wake() noexcept = 0;
};

}  // namespace gossamer::negotiate
