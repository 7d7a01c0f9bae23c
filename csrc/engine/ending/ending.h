// What the end of a backward means. Each answer is an object: Lockstep, Alone, Rounds. This file has the moments at which
// they differ, and the parts of the engine that they work with. Called by engine.cpp and, for the last bucket, by
// flight.cpp.
#pragma once

#include <mutex>

#include "engine/flight.h"
#include "engine/hooks.h"
#include "engine/worker.h"

namespace gossamer {

class Join;

// The parts of one engine, which owns them. The mutex guards what autograd's threads and the caller share while a backward
// runs. No thread takes the GIL while it holds the mutex, except in a join that was asked to call or raise early; callbacks
// run without the mutex.
struct Parts {
  std::mutex& mutex;
  Worker& worker;
  Hooks& hooks;
  Flight& flight;
  Join& join;
};

class Ending {
 public:
  explicit Ending(const Parts& parts) : parts_(parts) {}
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;
  virtual ~Ending() = default;

  // Called without the mutex. takes_gradients(): false: ignores them. gradient_complete(): a gradient was counted, and
  // its bucket is told.
  virtual bool takes_gradients() const { return true; }
  virtual void gradient_complete(int64_t /*index*/) {}

  // Whether the end of autograd's backward is this object's end.
  virtual bool ends_with_backward() const { return true; }

  // Called with the mutex. surplus(): one more gradient came for a parameter that was complete, whose gradient may
  // already be travelling.
  virtual void surplus(int64_t index) { parts_.hooks.refuse_surplus(index); }
  virtual void before_last_bucket() {}
  virtual void after_last_bucket() {}

  // Called without it: sends what is left, waits, and hands the gradients over. `abandoned`: the backward has raised.
  virtual void end(bool abandoned) = 0;

 protected:
  Parts parts_;
};

}  // namespace gossamer
