// What the ranks tell each other once per synchronised backward: have we taken the same number of optimizer
// steps, did anyone fail, does anyone have parameters that the plan lacks, and which parameters got a gradient
// anywhere. One small all-reduce of bytes, in flight while the last bucket is. The engine's private part.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace gossamer {

struct Agreement {
  bool same_steps = true;
  bool failed = false;
  bool late = false;
  std::vector<bool> used;  // by parameter index: some rank has a gradient
};

class AgreementRound {
 public:
  AgreementRound(Communicator& control, int64_t steps, bool failed, bool late, const std::vector<bool>& used);
  void start();      // issues the all-reduce
  Agreement wait();  // after start()

 private:
  Communicator& control_;
  at::Tensor message_;
  PendingPtr pending_;
};

// Every rank's text, for the error that all of them raise; empty for a rank that has none to tell.
// Texts are cut at 1000 bytes.
std::vector<std::string> gather_texts(Communicator& control, const std::string& text);

}  // namespace gossamer
