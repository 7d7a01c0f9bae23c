// What the ranks tell each other once per synchronised backward: have we taken the same number of optimizer
// steps, did anyone fail, does anyone have parameters that the plan lacks, or left some out, and which parameters got a gradient
// anywhere. One small all-reduce of bytes, in flight while the last bucket is. In a join, another one before it: who has
// input left. The engine's private part.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace gossamer {

struct Agreement {
  bool same_steps = true;
  bool failed = false;
  bool late = false;
  bool left_out = false;   // some rank has left out a parameter
  std::vector<bool> used;  // by parameter index: some rank has a gradient
};

class AgreementRound {
 public:
  // `steps` is this rank's number of optimizer steps; nullopt where it is not to be compared, on a rank that shadows.
  AgreementRound(Communicator& control, std::optional<int64_t> steps, bool failed, bool late, bool left_out,
                 const std::vector<bool>& used);
  void start();      // issues the all-reduce
  Agreement wait();  // after start()

 private:
  Communicator& control_;
  at::Tensor message_;
  PendingPtr pending_;
};

// Which ranks have input left: a byte for each. `over`: this rank has, but has left the join that the call is of.
class RollCall {
 public:
  RollCall(Communicator& control, bool present, bool over);
  void run();                       // the all-reduce
  std::vector<int> absent() const;  // after run(), in rank order
  int active() const;               // as many ranks as are not absent
  bool over() const;                // some rank has left the join

 private:
  Communicator& control_;
  at::Tensor message_;
};

// Every rank's text, for the error that all of them raise; empty for a rank that has none to tell.
// Texts are cut at 1000 bytes.
std::vector<std::string> gather_texts(Communicator& control, const std::string& text);

}  // namespace gossamer
