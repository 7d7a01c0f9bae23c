// See ticket.h.
#include "named/ticket.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace gossamer::named {

bool Ticket::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return seen(done_);
}

// Returns `over`; if true, the negotiator learns that the submitter knows of the end.
bool Ticket::seen(bool over) const {
  if (const auto negotiator = over ? negotiator_.lock() : nullptr) negotiator->waited();
  return over;
}

bool Ticket::wait_for(std::chrono::milliseconds limit) const {
  std::unique_lock<std::mutex> lock(mutex_);
  if (done_) return seen(true);
  lock.unlock();
  if (const auto negotiator = negotiator_.lock()) negotiator->hurry();
  lock.lock();
  return seen(over_.wait_for(lock, limit, [&] { return done_; }));
}

void Ticket::settle() const {
  if (!error_.empty()) throw Error(kind_, error_);
  if (!data_.finished) return;
  const c10::impl::VirtualGuardImpl guard(data_.finished->device_type());
  const c10::Stream stream = guard.getStream(data_.output.device());
  data_.finished->block(stream);
  guard.recordDataPtrOnStream(data_.output.storage().data_ptr(),
                              stream);  // the batch runner's stream made it
}

void Ticket::complete(const negotiate::Result& result) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    kind_ = result.kind;
    error_ = result.error;
    if (result.response) value_ = result.response->value;
    if (!error_.empty()) data_ = Data();
    data_.input.reset();
    data_.submitted.reset();
    done_ = true;
  }
  over_.notify_all();
}

}  // namespace gossamer::named
