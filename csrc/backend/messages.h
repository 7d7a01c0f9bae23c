// Single messages of a backend: posted all at once. Used by hosts.cpp, and by comm/c10d.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

namespace gossamer {

struct Message {
  std::vector<at::Tensor> tensors;  // one
  int peer;
};

// Adds a work to `works` for each message, so that those before an error are there.
void post_messages(c10d::Backend& backend, std::vector<Message>& incoming, std::vector<Message>& outgoing,
                   int tag, std::vector<c10::intrusive_ptr<c10d::Work>>& works);

}  // namespace gossamer
