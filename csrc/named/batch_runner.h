// Carries out what a negotiation has agreed on: packs a batch into one flat buffer where that pays, scales, calls the
// device's communicator, unpacks. Runs on the negotiation's worker thread; on an accelerator it uses a stream of its own,
// which events order against the submitters' streams. Rounding follows Horovod: a factor is applied and rounded before the
// sum, and another after it; integers are multiplied in float64 and truncated towards zero.
#pragma once

#include <c10/core/Stream.h>

#include <map>
#include <string>

#include "collectives/two_shot.h"
#include "named/ticket.h"
#include "negotiate/negotiator.h"

namespace gossamer::named {

using Devices = std::map<std::string, CommunicatorPtr>;  // by device type

class BatchRunner {
 public:
  // `near`: another communicator of the same ranks, in memory that they share; it carries small batches. May be null.
  BatchRunner(Devices devices, CommunicatorPtr near) : devices_(std::move(devices)), near_(std::move(near)) {}

  // Why this kind of operation and reduction does not work on this tensor; empty if it does.
  std::string complaint(negotiate::Collective kind, negotiate::Aggregate op, const at::Tensor& tensor) const;

  void run(const std::vector<negotiate::Part>& parts);

  // Tells the ranks that wait for this one in a collective that it has failed; any thread.
  void announce_failure() noexcept;

  // Payload bytes that this rank has sent to the others, and has received from them; any thread.
  uint64_t bytes_sent() const { return total(&Communicator::bytes_sent); }
  uint64_t bytes_received() const { return total(&Communicator::bytes_received); }

 private:
  struct Piece {  // a part, and its memory: dense, and in the order of its shape
    const negotiate::Response* response;
    Ticket::Data* data;  // null: this rank has joined
    at::Tensor input;
  };
  using Pieces = std::vector<Piece>;

  Communicator& carrier(const std::vector<negotiate::Part>& parts);
  void run_on(Communicator& comm, const std::vector<negotiate::Part>& parts);
  Pieces prepare(Communicator& comm, const std::vector<negotiate::Part>& parts);
  uint64_t total(uint64_t (Communicator::*bytes)() const) const;

  // batch_reductions.cpp
  void allreduce(Communicator& comm, Pieces& pieces);
  void allreduce_alone(Communicator& comm, const std::vector<Piece*>& pieces);
  void allreduce_packed(Communicator& comm, Pieces& pieces);
  // Reduces in place; contiguous; done once end() has returned. `lengths`: of its vectors, which Adasum treats one by one.
  struct Reducing {
    at::Tensor flat, widened;  // the second, if defined, holds the result of the first
    PendingPtr pending;        // null: it is done
  };
  Reducing begin(Communicator& comm, const at::Tensor& flat, negotiate::Aggregate op,
                 const std::vector<int64_t>& lengths);
  static void end(const Reducing& reducing);
  // Puts a result where its submitter wants it.
  static void finish(Piece& piece, const at::Tensor& result);
  void reducescatter(Communicator& comm, Pieces& pieces);

  // batch_moves.cpp
  void allgather(Communicator& comm, Pieces& pieces);
  void broadcast(Communicator& comm, Piece& piece);
  void alltoall(Communicator& comm, Piece& piece);

  // A flat buffer of `bytes`, the same on all ranks, which the next batch reuses.
  at::Tensor scratch(Communicator& comm, int64_t bytes);

  Devices devices_;
  CommunicatorPtr near_;
  std::map<Communicator*, at::Tensor> scratch_;
  std::map<Communicator*, at::Tensor> adasum_scratch_;
  Scratch wire_;                                     // of sums by hosts
  std::map<c10::DeviceIndex, c10::Stream> streams_;  // of accelerators
};

}  // namespace gossamer::named
