// Ends waits for single messages that will never come. Gloo cannot limit the time of such a wait without breaking the
// connection. So a thread looks five times a second whether the wait is in vain.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <memory>

namespace gossamer {

// Throws the reason for which a wait is in vain. It may block, and may still run when the wait has ended; so it owns what it
// needs.
using Look = std::function<void()>;

class Lookout {
 public:
  Lookout();
  Lookout(const Lookout&) = delete;
  Lookout& operator=(const Lookout&) = delete;
  ~Lookout();

  // Any thread. Throws what work.wait(limit) throws, or what `look` has thrown meanwhile. A limit that is reached breaks the
  // connection; by default it is the group's.
  void wait(c10d::Work& work, const Look& look, std::chrono::milliseconds limit = kNoTimeout);

 private:
  struct Post;
  std::shared_ptr<Post> post_;
};

}  // namespace gossamer
