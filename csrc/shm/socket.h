// Unix sockets that introduce ranks of one host to each other. They carry descriptors of shared memory, and their end shows
// that a peer has ended. No payload goes through them. Names are abstract (no file), so a socket can be reached only inside
// its network namespace; both sides check that the other is the same user.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "shm/futex.h"
#include "shm/memory.h"

namespace gossamer::shm {

class Socket {
 public:
  Socket() = default;
  explicit Socket(Fd fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }

  // One message of at most 64 KiB with its descriptors. `peer` names the other side in errors.
  void send(const void* data, size_t bytes, const std::vector<int>& fds, Deadline deadline,
            const std::string& peer) const;
  // Receives exactly `bytes` and `fd_count` descriptors.
  std::vector<Fd> receive(void* data, size_t bytes, size_t fd_count, Deadline deadline,
                          const std::string& peer) const;

  // Waits until there is something to receive, or the other side has ended; false at the deadline.
  bool readable(Deadline deadline) const;

  // The other side's user id; and a pidfd that becomes readable when its process ends (none if the process is in another PID
  // namespace and the kernel is older than 6.5).
  uid_t peer_user() const;
  Fd peer_process() const;

 private:
  Fd fd_;
};

class Listener {
 public:
  Listener();  // under a random name
  const std::string& name() const { return name_; }
  Socket accept(Deadline deadline) const;  // nothing if the deadline passes

 private:
  std::string name_;
  Fd fd_;
};

// Returns nothing if this network namespace has no such socket.
std::optional<Socket> connect(const std::string& name);

// 16 random bytes from the kernel, in hexadecimal.
std::string random_name();

}  // namespace gossamer::shm
