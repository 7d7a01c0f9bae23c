// Anonymous shared memory: a memfd and its mapping. It has no name, so nothing is left when the processes that hold it end,
// however they end, and the size of /dev/shm does not matter. socket.h passes it on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace gossamer::shm {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A shared mapping, zero-filled when created. Pages take memory only once they are written.
class Mapping {
 public:
  Mapping() = default;
  static Mapping create(size_t bytes);
  // Maps another process's memory. Refuses a file of another size, or one that its owner could still shrink: reading beyond
  // its end would be a SIGBUS.
  static Mapping attach(Fd fd, size_t bytes);

  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  // The file is needed only to pass the memory on; the mapping stays.
  void close_fd() { fd_ = Fd(); }

 private:
  void map();

  Fd fd_;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace gossamer::shm
