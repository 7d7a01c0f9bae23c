// One submitted operation as its submitter sees it: whether it is over, whether it failed, and its result. Made by
// collectives.cpp, completed on the worker thread of the negotiation, waited for by any thread. No GIL anywhere.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "negotiate/negotiator.h"

namespace gossamer::named {

class Ticket {
 public:
  // What the batch runner reads and fills. The tensors have no Python object, so any thread may free them.
  struct Data {
    at::Tensor input;   // as the submitter gave it
    at::Tensor target;  // where the submitter wants the result; undefined: in new memory
    at::Tensor output;
    std::vector<int64_t> received_splits;  // alltoall: rows from each rank
    std::optional<c10::Event> submitted;   // on the submitter's stream; none on the CPU
    std::optional<c10::Event> finished;    // on the batch runner's
  };

  // `negotiator` is told when a thread waits, and when one has seen the end.
  Ticket(std::string name, std::weak_ptr<negotiate::Negotiator> negotiator)
      : name_(std::move(name)), negotiator_(std::move(negotiator)) {}

  const std::string& name() const { return name_; }
  bool done() const;
  // Waits until the operation is over, but not longer than `limit`; returns whether it is over.
  bool wait_for(std::chrono::milliseconds limit) const;
  // Called once it is over. Throws Error(config) if this operation failed on every rank, and Error(comm) if the negotiation
  // has ended; otherwise makes the caller's current stream wait for the result.
  void settle() const;

  Data& data() { return data_; }            // the batch runner's until done(), anyone's to read afterwards
  int64_t value() const { return value_; }  // after done(): a join's last rank, in the set; an added set's id
  void complete(const negotiate::Result& result);

 private:
  bool seen(bool over) const;

  std::string name_;
  std::weak_ptr<negotiate::Negotiator> negotiator_;
  Data data_;
  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  bool done_ = false;
  ErrorKind kind_ = ErrorKind::config;
  std::string error_;
  int64_t value_ = -1;
};
using TicketPtr = std::shared_ptr<Ticket>;

}  // namespace gossamer::named
