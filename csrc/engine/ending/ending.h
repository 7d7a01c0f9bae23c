// What the end of a backward means, as one object for each answer: Lockstep, Alone, Rounds. Here is what they have in
// common: the moments at which they differ, and the parts of the engine that they work with. Called by engine.cpp and,
// for the last bucket, by flight.cpp.
#pragma once

#include <mutex>

#include "engine/flight.h"
#include "engine/hooks.h"
#include "engine/worker.h"

namespace gossamer {

class Join;

// Of one engine, which owns them. The mutex guards what autograd's threads and the caller share while a backward runs:
// no thread takes the GIL while it holds it (but in a join that was asked to call or raise early), and callbacks run
// without.
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

  virtual bool takes_gradients() const { return true; }  // without the mutex; false: they are not looked at

  // With the mutex. begin(): whether the end of autograd's backward is this one's. surplus(): a gradient that came on
  // top of one that may be travelling.
  virtual bool begin() { return true; }
  virtual void surplus(int64_t index) { parts_.hooks.refuse_surplus(index); }
  virtual void before_last_bucket() {}
  virtual void after_last_bucket() {}

  // Without it: sends what is left, waits, and hands the gradients over. `abandoned`: the backward has raised.
  virtual void end(bool abandoned) = 0;

 protected:
  Parts parts_;
};

}  // namespace gossamer
