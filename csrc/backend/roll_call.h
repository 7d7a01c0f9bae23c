// Finds out which ranks of a group over several hosts still answer, through its store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace gossamer {

class RollCall {
 public:
  // `store`: of the group alone.
  RollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // To be called by a rank that waits. Throws if the store does not answer.
  void answer_if_asked();
  // Asks all ranks, and says who is silent: "silent: rank 2". Takes half a second at most.
  std::string silent_ranks();

 private:
  void answer();

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
};

}  // namespace gossamer
