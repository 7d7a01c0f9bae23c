// epoll over sockets and pidfds; see watch.h. The one instance of a process is never destroyed: its thread
// sleeps in the kernel and ends with the process.
#include "shm/watch.h"

#include <sys/epoll.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "base/check.h"

namespace gossamer::shm {
namespace {

std::mutex instance_mutex;
Watch* instance = nullptr;
pid_t instance_owner = 0;

void add_to(int epoll, int fd, uint32_t events, uint64_t id) {
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.u64 = id;
  GOSSAMER_CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, ErrorKind::comm,
                 "shared memory: could not watch a peer: ", std::strerror(errno));
}

}  // namespace

Watch& Watch::of_this_process() {
  const std::lock_guard<std::mutex> lock(instance_mutex);
  if (!instance || instance_owner != getpid()) {  // a forked child has no threads: it gets its own
    instance = new Watch();
    instance_owner = getpid();
  }
  return *instance;
}

Watch::Watch() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  GOSSAMER_CHECK(epoll_, ErrorKind::comm, "shared memory: could not create an epoll: ", std::strerror(errno));
  std::thread([this] { run(); }).detach();
}

uint64_t Watch::add(const Socket& socket, std::function<void()> on_end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t id = next_id_++;
  Entry& entry = entries_[id];
  entry = {socket.fd(), socket.peer_process(), std::move(on_end)};
  try {
    add_to(epoll_.get(), entry.socket, EPOLLRDHUP, id);
    if (entry.process) add_to(epoll_.get(), entry.process.get(), EPOLLIN, id);
  } catch (...) {
    entries_.erase(id);
    throw;
  }
  return id;
}

void Watch::remove(uint64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.socket, nullptr);
  if (found->second.process) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.process.get(), nullptr);
  entries_.erase(found);
}

void Watch::run() {
  while (true) {
    epoll_event event{};
    if (epoll_wait(epoll_.get(), &event, 1, -1) != 1) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(event.data.u64);
    if (found == entries_.end() || !found->second.on_end) continue;
    std::exchange(found->second.on_end, nullptr)();
  }
}

}  // namespace gossamer::shm
