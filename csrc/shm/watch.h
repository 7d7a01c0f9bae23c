// Notices the end of other processes: one sleeping thread for the whole process, for any number of groups. A peer has ended
// if its process has (pidfd) or its socket is closed. The pidfd is needed where a forked child still holds the socket. Used
// by group.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "shm/socket.h"

namespace gossamer::shm {

class Watch {
 public:
  static Watch& of_this_process();

  // Calls `on_end` once, from the watching thread, when the process behind `socket` ends. The caller keeps the socket, which
  // must live until remove().
  uint64_t add(const Socket& socket, std::function<void()> on_end);
  // After it returns, on_end does not run and will not run. Not to be called from on_end.
  void remove(uint64_t id);

 private:
  Watch();
  [[noreturn]] void run();

  struct Entry {
    int socket;
    Fd process;
    std::function<void()> on_end;
  };
  Fd epoll_;
  std::mutex mutex_;
  std::map<uint64_t, Entry> entries_;
  uint64_t next_id_ = 1;
};

}  // namespace gossamer::shm
