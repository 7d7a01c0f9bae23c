// memfd_create, seals and mmap; see memory.h.
#include "shm/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace gossamer::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

Mapping Mapping::create(size_t bytes) {
  Mapping mapping;
  mapping.bytes_ = bytes;
  mapping.fd_ = Fd(memfd_create("gossamer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool sized = mapping.fd_ && ftruncate(mapping.fd_.get(), static_cast<off_t>(bytes)) == 0 &&
                     fcntl(mapping.fd_.get(), F_ADD_SEALS, kSeals) == 0;
  GOSSAMER_CHECK(sized, ErrorKind::comm, "shared memory: memfd_create of ", bytes,
                 " bytes failed: ", std::strerror(errno));
  mapping.map();
  return mapping;
}

Mapping Mapping::attach(Fd fd, size_t bytes) {
  struct stat found{};
  const bool known = fstat(fd.get(), &found) == 0;
  GOSSAMER_CHECK(known && found.st_size == static_cast<off_t>(bytes), ErrorKind::comm,
                 "shared memory: a peer's memory must have ", bytes, " bytes, got ", found.st_size);
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  GOSSAMER_CHECK(seals >= 0 && (seals & F_SEAL_SHRINK), ErrorKind::comm,
                 "shared memory: a peer's memory must be sealed against shrinking, got seals ", seals);
  Mapping mapping;
  mapping.bytes_ = bytes;
  mapping.fd_ = std::move(fd);
  mapping.map();
  return mapping;
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_) munmap(data_, bytes_);
}

void Mapping::map() {
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  GOSSAMER_CHECK(data != MAP_FAILED, ErrorKind::comm, "shared memory: mapping ", bytes_,
                 " bytes failed: ", std::strerror(errno));
  data_ = static_cast<uint8_t*>(data);
}

}  // namespace gossamer::shm
