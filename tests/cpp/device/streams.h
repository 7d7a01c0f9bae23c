// A simulated device whose work is late on purpose: streams, events and memory, in host memory. A task that is queued on a
// late stream runs only when the host waits for it, when another stream that the host waits for needs it, or when another
// process has come to a meeting that waits behind it: devices go on while their hosts wait for each other. Tasks of the other streams run as soon as the events that they wait for allow it. So a missing event wait, or memory
// that is freed while a stream still uses it, gives wrong numbers every time. late_device.cpp gives it to torch.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace late {

using StreamId = int64_t;
constexpr StreamId kMain = 0;  // the default stream
constexpr StreamId kReaper = -1;
constexpr int kScribble = 0xff;  // each float of it is NaN

enum class Lateness : int { none = 0, main = 1, side = 2, all = 3 };

// A place in a stream. It is done once everything that was queued before it has run.
struct Mark {
  StreamId stream;
  bool done = false;
};
using MarkPtr = std::shared_ptr<Mark>;

class Device {
 public:
  static Device& instance() {
    static auto* device = new Device();
    return *device;
  }

  StreamId new_stream() {
    const Lock lock(mutex_);
    return ++streams_;
  }

  void set_lateness(Lateness lateness) {
    const Lock lock(mutex_);
    lateness_ = lateness;
    run_prompt();
  }

  void push(StreamId stream, std::function<void()> task) { push_when(stream, nullptr, std::move(task)); }

  // A task that waits in its stream until ready() is true, such as one that waits for another process. It is late no longer
  // once is_awaited() is true.
  void push_when(StreamId stream, std::function<bool()> ready, std::function<void()> task,
                 std::function<bool()> is_awaited = nullptr) {
    const Lock lock(mutex_);
    ++(stream == kMain ? main_tasks_ : side_tasks_);
    auto mark = is_awaited ? std::make_shared<Mark>(Mark{stream}) : nullptr;
    queues_[stream].push_back({std::move(task), nullptr, mark, std::move(ready)});
    if (mark) {
      if (!hurries_) std::thread([this] { hurry(); }).detach();
      hurries_ = true;
      awaited_.push_back({std::move(mark), std::move(is_awaited)});
    }
    run_prompt();
  }

  MarkPtr record(StreamId stream) {
    const Lock lock(mutex_);
    return record_locked(stream);
  }

  void block(StreamId stream, MarkPtr mark) {
    const Lock lock(mutex_);
    if (stream != mark->stream && waits_++ == dropped_wait_) return;
    queues_[stream].push_back({nullptr, std::move(mark), nullptr});
    run_prompt();
  }

  // What has been queued on the main stream, and on all others: kernels, operations of torch and of c10d.
  std::pair<int64_t, int64_t> tasks() {
    const Lock lock(mutex_);
    return {main_tasks_, side_tasks_};
  }

  // Seeded faults. From now on waits of one stream for another are counted, and the wait with this number is dropped.
  void drop_wait(int number) {
    const Lock lock(mutex_);
    dropped_wait_ = number;
    waits_ = 0;
  }
  int waits() {
    const Lock lock(mutex_);
    return waits_;
  }
  void drop_records(bool drop) {
    const Lock lock(mutex_);
    drops_records_ = drop;
  }

  bool is_done(const MarkPtr& mark) {
    const Lock lock(mutex_);
    while (asking_is_waiting_ && !mark->done && advance(mark)) {
    }
    return mark->done;
  }
  // Until settle(): a host that asks waits, so streams are not late for it.
  void asking_is_waiting() {
    const Lock lock(mutex_);
    asking_is_waiting_ = true;
  }
  void synchronize(const MarkPtr& mark) {
    Lock lock(mutex_);
    run_until(mark, lock);
    rethrow();
  }
  void synchronize(StreamId stream) { synchronize(record(stream)); }
  void synchronize() {
    Lock lock(mutex_);
    std::vector<MarkPtr> ends;
    for (const auto& [stream, queue] : queues_) ends.push_back(std::make_shared<Mark>(Mark{stream}));
    for (const auto& end : ends) queues_[end->stream].push_back({nullptr, nullptr, end});
    for (const auto& end : ends) run_until(end, lock);
    rethrow();
  }

  // Memory belongs to the stream on which it was allocated. Where it is freed, that stream overwrites it, as if the next
  // allocation of the stream did so. Memory that was recorded on other streams waits for them first.
  void* allocate(size_t bytes, StreamId stream) {
    const Lock lock(mutex_);
    void* memory = std::malloc(bytes);
    std::memset(memory, kScribble, bytes);
    blocks_[memory] = {bytes, stream, {}};
    return memory;
  }

  void use(const void* address, StreamId stream) {
    const Lock lock(mutex_);
    if (drops_records_) return;
    auto found = blocks_.upper_bound(const_cast<void*>(address));
    if (found == blocks_.begin()) throw std::runtime_error("late: this memory was not allocated here");
    --found;
    if (stream != found->second.owner) found->second.users.insert(stream);
  }

  void free(void* memory) {
    const Lock lock(mutex_);
    const auto found = blocks_.find(memory);
    const Block block = found->second;
    blocks_.erase(found);
    freed_.push_back(memory);
    const auto scribble = [memory, block] { std::memset(memory, kScribble, block.bytes); };
    if (block.users.empty()) {
      queues_[block.owner].push_back({scribble, nullptr, nullptr});
    } else {
      auto& queue = queues_[kReaper];
      for (const StreamId user : block.users) queue.push_back({nullptr, record_locked(user), nullptr});
      queue.push_back({nullptr, record_locked(block.owner), nullptr});
      queue.push_back({scribble, nullptr, nullptr});
    }
    run_prompt();
  }

  // Runs everything, and gives freed memory back to the host.
  void settle() {
    synchronize();
    const Lock lock(mutex_);
    for (void* memory : freed_) std::free(memory);
    freed_.clear();
    lateness_ = Lateness::none;
    dropped_wait_ = -1;
    drops_records_ = asking_is_waiting_ = false;
  }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Item {
    std::function<void()> task;
    MarkPtr wait;  // for this
    MarkPtr mark;  // is done now
    std::function<bool()> ready = nullptr;
    bool may_run() const { return (!wait || wait->done) && (!ready || ready()); }
  };
  struct Block {
    size_t bytes;
    StreamId owner;
    std::set<StreamId> users;
  };

  MarkPtr record_locked(StreamId stream) {
    auto mark = std::make_shared<Mark>(Mark{stream});
    queues_[stream].push_back({nullptr, nullptr, mark});
    run_prompt();
    return mark;
  }

  bool is_prompt(StreamId stream) const {
    if (stream == kReaper || lateness_ == Lateness::none) return true;
    return lateness_ == (stream == kMain ? Lateness::side : Lateness::main);
  }

  void run(std::deque<Item>& queue) {
    const Item item = std::move(queue.front());
    queue.pop_front();
    try {
      if (item.task) item.task();
    } catch (...) {
      failure_ = std::current_exception();
    }
    if (item.mark) item.mark->done = true;
  }

  void run_prompt() {
    for (bool again = true; again;) {
      again = false;
      for (auto& [stream, queue] : queues_) {
        while (is_prompt(stream) && !queue.empty() && queue.front().may_run()) {
          run(queue);
          again = true;
        }
      }
    }
  }

  // Runs one item that the mark needs. Returns false if it must wait for another process.
  bool advance(const MarkPtr& mark) {
    auto& queue = queues_[mark->stream];
    if (queue.empty()) throw std::runtime_error("late: a stream waits for itself");
    if (const MarkPtr wait = queue.front().wait; wait && !wait->done) return advance(wait);
    if (!queue.front().may_run()) return false;
    run(queue);
    run_prompt();
    return true;
  }

  void run_until(const MarkPtr& mark, Lock& lock) {
    while (!mark->done)
      if (!advance(mark)) let_others_run(lock);
  }

  static void let_others_run(Lock& lock, int microseconds = 50) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    lock.lock();
  }

  // A thread of its own, as long as the process lives.
  void hurry() {
    for (Lock lock(mutex_);; let_others_run(lock, awaited_.empty() ? 1000 : 50)) {
      for (size_t i = 0; i < awaited_.size(); ++i) {
        const MarkPtr mark = awaited_[i].first;
        while (!mark->done && awaited_[i].second() && advance(mark)) {
        }
      }
      awaited_.erase(
          std::remove_if(awaited_.begin(), awaited_.end(), [](const auto& each) { return each.first->done; }),
          awaited_.end());
    }
  }

  void rethrow() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  std::mutex mutex_;
  std::map<StreamId, std::deque<Item>> queues_;
  std::map<void*, Block> blocks_;
  std::vector<void*> freed_;
  StreamId streams_ = kMain;
  Lateness lateness_ = Lateness::none;
  int waits_ = 0, dropped_wait_ = -1;
  int64_t main_tasks_ = 0, side_tasks_ = 0;
  bool drops_records_ = false, asking_is_waiting_ = false;
  std::exception_ptr failure_;
  std::vector<std::pair<MarkPtr, std::function<bool()>>> awaited_;  // what other processes may wait for
  bool hurries_ = false;
};

}  // namespace late
