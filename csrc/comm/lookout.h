// Ends waits for single messages when another rank announces a failure. Gloo cannot limit the time of such a wait without
// breaking the connection. So a thread asks five times a second; each communicator has one, from its first such wait on.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <string>

namespace gossamer {

class Lookout {
 public:
  // `failed` returns what another rank has announced, or nothing. It may block. It is not called after this object is
  // gone. An exception from it counts as a failure.
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
