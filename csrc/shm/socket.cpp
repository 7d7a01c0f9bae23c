// SOCK_SEQPACKET sockets in the abstract namespace; see socket.h.
#include "shm/socket.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/check.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace gossamer::shm {
namespace {

constexpr size_t kMaxFds = 250;  // the kernel passes at most 253 in one message

Fd open_socket() {
  Fd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  GOSSAMER_CHECK(fd, ErrorKind::comm,
                 "shared memory: could not create a unix socket: ", std::strerror(errno));
  return fd;
}

socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;  // sun_path[0] stays 0: an abstract name
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool poll_until(int fd, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd item{fd, events, 0};
    const int ready =
        ::poll(&item, 1, static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(left, 60000))));
    if (ready > 0) return true;
    if (ready == 0 && left <= 0) return false;
    GOSSAMER_CHECK(ready == 0 || errno == EINTR, ErrorKind::comm,
                   "shared memory: poll failed: ", std::strerror(errno));
  }
}

}  // namespace

std::string random_name() {
  unsigned char bytes[16];
  GOSSAMER_CHECK(getrandom(bytes, sizeof(bytes), 0) == sizeof(bytes), ErrorKind::comm,
                 "shared memory: could not get random bytes: ", std::strerror(errno));
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

void Socket::send(const void* data, size_t bytes, const std::vector<int>& fds, Deadline deadline,
                  const std::string& peer) const {
  GOSSAMER_CHECK(fds.size() <= kMaxFds, ErrorKind::comm, "shared memory: at most ", kMaxFds,
                 " descriptors fit one message, got ", fds.size());
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(sizeof(int) * fds.size()));
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  }
  while (::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    GOSSAMER_CHECK(errno == EAGAIN, ErrorKind::comm, peer, " has ended: ", std::strerror(errno));
    GOSSAMER_CHECK(poll_until(fd_.get(), POLLOUT, deadline), ErrorKind::comm, peer, " does not answer");
  }
}

std::vector<Fd> Socket::receive(void* data, size_t bytes, size_t fd_count, Deadline deadline,
                                const std::string& peer) const {
  iovec part{data, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(sizeof(int) * kMaxFds));
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = -1;
  do {
    GOSSAMER_CHECK(poll_until(fd_.get(), POLLIN, deadline), ErrorKind::comm, peer, " does not answer");
    got = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (got < 0 && (errno == EINTR || errno == EAGAIN));
  std::vector<Fd> fds;
  if (got >= 0) {
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        fds.emplace_back(fd);
      }
    }
  }
  GOSSAMER_CHECK(got > 0, ErrorKind::comm, peer, " has ended");
  GOSSAMER_CHECK(static_cast<size_t>(got) == bytes && fds.size() == fd_count, ErrorKind::comm, peer,
                 " must send ", bytes, " bytes and ", fd_count, " descriptors, got ", got, " and ",
                 fds.size());
  return fds;
}

bool Socket::readable(Deadline deadline) const { return poll_until(fd_.get(), POLLIN, deadline); }

uid_t Socket::peer_user() const {
  ucred peer{};
  socklen_t size = sizeof(peer);
  GOSSAMER_CHECK(getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0, ErrorKind::comm,
                 "shared memory: could not get a peer's user: ", std::strerror(errno));
  return peer.uid;
}

Fd Socket::peer_process() const {
  int pidfd = -1;
  socklen_t size = sizeof(pidfd);
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0) return Fd(pidfd);
  ucred peer{};
  size = sizeof(peer);
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 0) return Fd();
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

Listener::Listener() : name_("gossamer-" + random_name()), fd_(open_socket()) {
  sockaddr_un address;
  const socklen_t size = address_of(name_, address);
  const bool ready =
      ::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 && ::listen(fd_.get(), 4096) == 0;
  GOSSAMER_CHECK(ready, ErrorKind::comm, "shared memory: could not listen: ", std::strerror(errno));
}

Socket Listener::accept(Deadline deadline) const {
  while (poll_until(fd_.get(), POLLIN, deadline)) {
    Fd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd) return Socket(std::move(fd));
    GOSSAMER_CHECK(errno == EINTR || errno == EAGAIN || errno == ECONNABORTED, ErrorKind::comm,
                   "shared memory: accept failed: ", std::strerror(errno));
  }
  return Socket();
}

std::optional<Socket> connect(const std::string& name) {
  Fd fd = open_socket();
  sockaddr_un address;
  const socklen_t size = address_of(name, address);
  while (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (errno == EINTR) continue;
    if (errno == ECONNREFUSED || errno == ENOENT) return std::nullopt;
    GOSSAMER_CHECK(false, ErrorKind::comm,
                   "shared memory: connecting to a peer failed: ", std::strerror(errno));
  }
  return Socket(std::move(fd));
}

}  // namespace gossamer::shm
