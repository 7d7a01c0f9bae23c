// Uneven inputs: a rank that is out of batches takes part in the backwards of the others with zeros, so that none waits for
// it; it "shadows" them. Each synchronised backward of a join begins with a roll call; what follows is the same on all
// ranks. A join works with any ending; the ending asks the join who takes part. The roll call also tells how many samples
// each rank has counted, so ranks that count call the roll outside a join too.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/worker.h"

namespace gossamer {

class Join {
 public:
  Join(Worker& worker, std::mutex& mutex) : worker_(worker), mutex_(mutex) {}  // the engine's mutex

  // Called between backwards, the same on every rank. `mean_of_active`: averages are over the ranks that have input, else
  // over all. `raise_early`: the backward raises where a rank has no input. `on_begin`, if any, is called before each roll
  // call on ranks with input; if it returns false on any rank, the join ends on all ranks with that backward.
  void start(bool mean_of_active, bool raise_early, std::function<bool()> on_begin);
  void end();
  bool started() const { return settings_.has_value(); }
  // Whether it has raised on all ranks, as it was asked to.
  bool ended_early() const { return ended_early_.has_value(); }

  // Called between backwards: the samples behind this rank's gradients in the next synchronised backward, at least 0.
  // From then on ranks weight their gradients by them; all ranks count, or none.
  void count(double samples);
  bool counts() const { return counts_; }
  // What this rank's gradients are to be multiplied by, after the roll call: its samples, of the mean of all ranks'. Throws
  // on every rank if some ranks have not counted.
  double weight() const;

  // The moments of a backward. answer_roll(): for a rank without input, without the mutex; false if no rank has input.
  void begin_backward();  // with the mutex, as begin_shadow() and end_backward()
  bool answer_roll();
  void begin_shadow() { shadowing_ = true; }
  void settle();  // after the wait, without the mutex
  void end_backward();

  // Who takes part in this backward; valid after the wait, but shadowing() always.
  bool shadowing() const { return shadowing_; }                 // this rank has no input
  bool everyone() const { return !roll_ || absent().empty(); }  // every rank has
  double scale() const;  // what averages over all ranks are to be multiplied by

 private:
  struct Settings {
    bool mean_of_active = false;
    bool raise_early = false;
    std::function<bool()> on_begin;
  };
  void call_roll(bool present);
  std::vector<double> counted() const;  // by each rank
  void finish_roll(bool raise_early);
  std::vector<int> absent() const;  // in rank order
  int active() const { return worker_.control().size() - static_cast<int>(absent().size()); }

  Worker& worker_;
  std::mutex& mutex_;
  std::optional<Settings> settings_;
  std::optional<at::Tensor> roll_;  // of this backward: a byte for each rank, and then a double for each
  std::optional<double> samples_;   // for the next backward
  bool counts_ = false;             // it has counted before
  bool shadowing_ = false;
  std::optional<std::string> ended_early_;
};

}  // namespace gossamer
