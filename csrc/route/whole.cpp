// Rows that travel whole: each hop is one operation of the group, and measures the link. See rows.h.
#include <chrono>

#include "route/route.h"
#include "route/rows.h"

namespace gossamer {
namespace {

class WholeRows : public Rows {
 public:
  WholeRows(Communicator& comm, Scratch& scratch, const Shape& shape)
      : Rows(comm, shape, 0), bytes_(pieces_[0].row_bytes), in_place_(shape.whole.defined()) {
    sending_ = in_place_ ? shape.whole : scratch.send(comm.size() * bytes_, shape.device);
    if (shape.hops != Hops::second) receiving_ = scratch.receive(comm.size() * bytes_, shape.device);
  }

  uint8_t* send(const Piece&) override { return bytes_of(sending_); }
  void post(const Piece&) override {
    begin([&] { return comm_.all_to_all(receiving_, sending_); });
  }
  codec::WireRows swap(const Piece&) override {
    end();
    return bytes_of(receiving_);
  }
  // After the first hop, the row that this rank sent to itself is free.
  uint8_t* own(const Piece&) override { return bytes_of(sending_) + comm_.rank() * bytes_; }
  void share(const Piece&) override {
    begin([&] { return comm_.all_gather(sending_, sending_.narrow(0, comm_.rank() * bytes_, bytes_)); });
  }
  codec::WireRows gather(const Piece&) override {
    end();
    return bytes_of(sending_);
  }
  bool in_place() const override { return in_place_; }

 private:
  using Clock = std::chrono::steady_clock;

  template <class Operation>
  void begin(const Operation& operation) {
    begun_ = Clock::now();
    pending_ = operation();
  }

  void end() {
    pending_->wait();
    const std::chrono::duration<double> elapsed = Clock::now() - begun_;
    Route::of(comm_).pace().measured(comm_, bytes_, elapsed.count());
  }

  int64_t bytes_;
  bool in_place_;
  at::Tensor sending_, receiving_;
  PendingPtr pending_;
  Clock::time_point begun_;
};

}  // namespace

RowsPtr whole_rows(Communicator& comm, Scratch& scratch, const Shape& shape) {
  return std::make_unique<WholeRows>(comm, scratch, shape);
}

}  // namespace gossamer
