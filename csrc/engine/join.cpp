// Uneven inputs: a rank that is out of batches shadows the backwards of the others, so that none waits for it. Each
// backward of a join begins with a roll call; what follows is the same for all ranks. The rest of Engine is in engine.cpp.
#include <ATen/DeviceGuard.h>
#include <ATen/core/Tensor.h>

#include <sstream>
#include <stdexcept>
#include <utility>

#include "engine/engine.h"

namespace gossamer {

void Engine::start_join(bool mean_of_active, bool raise_early, std::function<bool()> on_begin) {
  check_alive();
  const std::lock_guard<std::mutex> lock(mutex_);
  join_ = Join{mean_of_active, raise_early, std::move(on_begin)};
  ended_early_.reset();
}

void Engine::end_join() {
  std::optional<Join> ended;  // may hold a Python object, which goes without the mutex
  const std::lock_guard<std::mutex> lock(mutex_);
  ended.swap(join_);
}

// An active rank goes on with its backward meanwhile: the worker sends no bucket before the roll call is over.
void Engine::call_roll_locked(bool present) {
  if (ended_early_) throw std::runtime_error(*ended_early_);  // the other ranks have left
  const bool over = present && join_->on_begin && !join_->on_begin();
  roll_ = std::make_shared<RollCall>(*control_, present, over);
  executor_->submit([this, roll = roll_] { run_guarded("join", [&] { roll->run(); }); }, "roll call");
  // With the mutex, so that another device's thread of this backward sends nothing meanwhile.
  if (present && join_->raise_early) finish_roll(/*raise_early=*/true);
}

// Throws if it is over and a rank is absent that the others must not go on without.
void Engine::finish_roll(bool raise_early) {
  wait();
  check_alive();  // it may have been closed meanwhile
  const auto absent = roll_->absent();
  if (!raise_early || absent.empty() || roll_->active() == 0) return;
  roll_.reset();
  std::ostringstream text;
  text << place() << ": no input is left on rank";
  for (const int rank : absent) text << (rank == absent.front() ? " " : ", ") << rank;
  text << "; join() was asked to raise then (throw_on_early_termination=True)";
  ended_early_ = text.str();
  throw std::runtime_error(*ended_early_);
}

bool Engine::shadow() {
  bool raise_early = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_alive();
    if (!join_) throw PythonError(ErrorKind::config, "join: this rank is in no join context");
    raise_early = join_->raise_early;
    call_roll_locked(/*present=*/false);
  }
  finish_roll(
      raise_early);  // without the mutex: it takes as long as the others do, and Ctrl-C may close this engine
  if (roll_->active() == 0) {
    roll_.reset();
    return false;
  }
  struct Shadowing {
    Engine& engine;
    explicit Shadowing(Engine& engine) : engine(engine) { engine.shadowing_ = true; }
    ~Shadowing() { engine.shadowing_ = false; }
  } shadowing{*this};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_alive();
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].bucket >= 0) params_[i].mutable_grad().reset();
    }
    in_backward_ = in_lockstep_ = true;
    arrival_.clear();
  }
  finish(/*abandoned=*/false);
  return true;
}

// The works have divided by all ranks.
void Engine::scale_to_active() {
  if (!roll_ || !join_ || !join_->mean_of_active || roll_->absent().empty()) return;
  const double scale = static_cast<double>(control_->size()) / roll_->active();
  for (const auto& planned : buckets_) {
    if (!planned.bucket->has("grad")) continue;
    const c10::OptionalDeviceGuard guard(planned.bucket->device());
    planned.bucket->flat("grad").mul_(scale);
  }
}

void Engine::give_up(const std::string& why, bool announce) {
  if (closed_ || broken_) return;
  broken_ = place() + ": " + why;
  if (announce) announce_failure();
}

}  // namespace gossamer
