// Carries out what a negotiation has agreed on: packs a batch into one flat buffer where that pays, scales, calls the c10d
// backend of the device, unpacks. Runs on the negotiation's worker thread; on an accelerator on a stream of its own,
// ordered against the submitters' streams by events. Horovod's rules of rounding: a factor is applied, and rounded, before the
// sum and after it; integers are multiplied in float64 and cut off towards zero.
#pragma once

#include <c10/core/Stream.h>

#include <map>
#include <string>

#include "comm/c10d.h"
#include "named/ticket.h"
#include "negotiate/negotiator.h"

namespace gossamer::named {

using Devices = std::map<std::string, std::shared_ptr<C10dCommunicator>>;  // by device type

class Executor {
 public:
  // `near`: another connection of the same ranks, in memory that they share; carries what is small. May be null.
  explicit Executor(Devices devices, std::shared_ptr<C10dCommunicator> near = nullptr)
      : devices_(std::move(devices)), near_(std::move(near)) {}

  // Why this tensor cannot be reduced or moved by that kind and reduction; empty if it can.
  std::string complaint(negotiate::Kind kind, negotiate::Reduction op, const at::Tensor& tensor) const;

  void run(const std::vector<negotiate::Part>& parts);

  // The ranks that wait for this one in a collective learn that it has failed; any thread.
  void announce_failure() noexcept;

 private:
  struct Piece {  // a part, and its memory: dense, and in the order of its shape
    const negotiate::Response* response;
    Ticket::Data* data;  // null: this rank has joined
    at::Tensor input;
  };
  using Pieces = std::vector<Piece>;

  C10dCommunicator& carrier(const std::vector<negotiate::Part>& parts);
  void run_on(C10dCommunicator& comm, const std::vector<negotiate::Part>& parts);
  Pieces prepare(C10dCommunicator& comm, const std::vector<negotiate::Part>& parts);

  // executor_reductions.cpp
  void allreduce(C10dCommunicator& comm, Pieces& pieces);
  void allreduce_alone(C10dCommunicator& comm, const std::vector<Piece*>& pieces);
  void allreduce_packed(C10dCommunicator& comm, Pieces& pieces);
  // In place, contiguous; `lengths`: of the vectors in it, which Adasum treats one by one.
  void reduce(C10dCommunicator& comm, const at::Tensor& flat, negotiate::Reduction op,
              const std::vector<int64_t>& lengths);
  struct Reducing {  // an all-reduce that has begun
    at::Tensor flat, dressed;
    bool wide;  // `dressed` must be copied back
    c10::intrusive_ptr<c10d::Work> work;
  };
  static Reducing begin(C10dCommunicator& comm, const at::Tensor& flat, negotiate::Reduction op);
  static void end(C10dCommunicator& comm, const Reducing& reducing);
  // Puts a result where its submitter wants it.
  static void finish(Piece& piece, const at::Tensor& result);
  void reducescatter(C10dCommunicator& comm, Pieces& pieces);

  // executor_moves.cpp
  void allgather(C10dCommunicator& comm, Pieces& pieces);
  void broadcast(C10dCommunicator& comm, Piece& piece);
  void alltoall(C10dCommunicator& comm, Piece& piece);

  // A flat buffer of these bytes, equal on all ranks, reused by the next batch.
  at::Tensor scratch(C10dCommunicator& comm, int64_t bytes);
  static void wait(C10dCommunicator& comm, const c10::intrusive_ptr<c10d::Work>& work, const char* what,
                   int64_t bytes);

  Devices devices_;
  std::shared_ptr<C10dCommunicator> near_;
  std::map<C10dCommunicator*, at::Tensor> scratch_;
  std::map<C10dCommunicator*, at::Tensor> adasum_scratch_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;  // of accelerators
};

}  // namespace gossamer::named
