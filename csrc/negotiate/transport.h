// How the ranks of one negotiation reach each other: small messages between rank 0 and every other rank, in both
// directions. The product implements it over c10d or shared memory, tests over queues. Each process set has its own, which
// carries nothing else. Only the worker thread calls send and receive; any thread may call wake.
//
// Required: the messages of one sender arrive whole, once each, in the order in which they were sent. If a peer is lost,
// receive must throw an Error(comm) that names it: rank 0 for any peer, another rank for rank 0. Nothing else bounds the
// wait for a peer, because an idle peer sends nothing.
//
// Cost: an operation that all ranks submit at once takes two messages in a row, from a member to rank 0 and back. Rank 0
// executes after the first, so in a blocking collective the ranks differ by only one message. A submission of cached
// operations has 17 bytes and one bit for each slot; a decision of one batch of them has about 29 bytes. To stay within
// 1.3 times a 4-byte all-reduce, a message must cost less than 0.15 of it: between ranks of one host this needs shared
// memory. Over TCP two messages cost about as much as a small all-reduce, unless several operations are in flight: then
// they are negotiated while others execute, or together.
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

  // Returns without waiting for the receiver, which may be executing and waiting for this rank.
  virtual void send(int to, const Bytes& message) = 0;

  // The next message from any rank. False after `deadline` (a past one only looks) or after wake().
  virtual bool receive(Received& received, Clock::time_point deadline) = 0;

  // Ends the present receive(), or the next one if there is none. Must not block, and must not throw.
  virtual void wake() noexcept = 0;
};

}  // namespace gossamer::negotiate
