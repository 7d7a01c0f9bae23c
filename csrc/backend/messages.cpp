// See messages.h. Receives come first. Gloo announces each receive to its sender over the same connection as its messages:
// behind a message already begun, the announcement would wait, and one direction would start only after the other has ended.
#include "backend/messages.h"

#include <sched.h>

#include <chrono>
#include <thread>

namespace gossamer {
namespace {

constexpr int64_t kShort = int64_t{32} << 10;  // bytes

// Gloo's thread spins while another thread uses a connection; on one core that lasts until the scheduler's turn ends, some
// ms. It has most to do between the receives and the sends, so it gets the core first, unless the sends are so long that such
// a turn does not matter.
void let_gloo_run(const std::vector<Message>& outgoing) {
  static const bool one_core = [] {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof(cores), &cores) == 0 && CPU_COUNT(&cores) == 1;
  }();
  int64_t bytes = 0;
  for (const Message& message : outgoing) bytes += static_cast<int64_t>(message.tensors[0].nbytes());
  // A yield would not be enough.
  if (one_core && bytes < kShort) std::this_thread::sleep_for(std::chrono::microseconds(1));
}

}  // namespace

void post_messages(c10d::Backend& backend, std::vector<Message>& incoming, std::vector<Message>& outgoing,
                   int tag, std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  for (auto& [tensors, source] : incoming) works.push_back(backend.recv(tensors, source, tag));
  if (backend.getBackendName() == "gloo") let_gloo_run(outgoing);
  for (auto& [tensors, to] : outgoing) works.push_back(backend.send(tensors, to, tag));
}

}  // namespace gossamer
