// Gloo's wait for one message takes no time limit without breaking the connection. This ends such waits when another rank
// says that it has failed: a thread that asks so five times a second. One a communicator, from its first such wait on.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <string>

namespace gossamer {

class Lookout {
 public:
  // `failed` returns what another rank has said, or nothing. It may block, and is not called after the end of this; what it
  // throws counts as a failure.
  explicit Lookout(std::function<std::string()> failed);
  Lookout(const Lookout&) = delete;
  Lookout& operator=(const Lookout&) = delete;
  ~Lookout();

  // Any thread. Throws what work.wait() throws, and std::runtime_error if another rank has failed.
  void wait(c10d::Work& work);

 private:
  struct Post;
  std::shared_ptr<Post> post_;
};

}  // namespace gossamer
