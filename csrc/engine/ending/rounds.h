// The end of a round, for a face that sees no forward, as Horovod's. Several backwards may bring the gradients of a round;
// the end of a backward means nothing. Engine::end_round() ends the round, in step on all ranks, as Lockstep does.
#pragma once

#include "engine/ending/lockstep.h"

namespace gossamer {

class Rounds : public Ending {
 public:
  Rounds(const Parts& parts, Lockstep& lockstep) : Ending(parts), lockstep_(lockstep) {}

  // A parameter is complete with its gradient number `passes`; one more before the round's end throws an AssertionError
  // out of that backward. Called between rounds, or at any time to count `passes` anew for incomplete parameters.
  void set_passes(int64_t passes);
  bool under_way() const;  // some parameter of this round is complete

  bool takes_gradients() const override { return !parts_.worker.broken(); }  // the end of the round raises
  bool ends_with_backward() const override { return false; }
  void surplus(int64_t index) override;
  void before_last_bucket() override { lockstep_.before_last_bucket(); }
  void after_last_bucket() override { lockstep_.after_last_bucket(); }
  void end(bool abandoned) override { lockstep_.end(abandoned, /*trained_too=*/true); }

 private:
  Lockstep& lockstep_;
  int64_t passes_ = 1;
};

}  // namespace gossamer
