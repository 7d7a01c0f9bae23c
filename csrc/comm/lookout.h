// Gloo's wait for one message takes no time limit without breaking the connection. This ends such waits when another rank
// says that it has failed: a thread that asks so once a second. One a communicator, from its first such wait on.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>

namespace gossamer {

class Lookout {
 public:
  // `failed` may block, and is not called after the end of this; what it throws counts as a failure.
  explicit Lookout(std::function<bool()> failed);
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
