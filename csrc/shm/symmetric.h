// Memory that every rank of a host maps. Each rank makes a block, all map all blocks, and an operation on a tensor in one
// needs no copy. Torch-free; the allocator behind torch's symmetric memory is backend/symmetric_memory.cpp.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "shm/collectives.h"
#include "shm/group.h"

namespace gossamer::shm {

// One rank's own block, before and after it is shared.
struct Block {
  explicit Block(int64_t bytes) : mapping(Mapping::create(static_cast<size_t>(bytes))) {}
  Mapping mapping;
};

// The blocks of all ranks of a group, as this rank maps them.
class Shared {
 public:
  // Collective: all ranks bring blocks of equal size. `id` is equal on all ranks.
  Shared(Group& group, std::shared_ptr<Block> own, int64_t id, Deadline deadline);

  int64_t id() const { return id_; }
  const Block& own() const { return *own_; }
  const std::vector<void*>& bases() const { return bases_; }

 private:
  std::shared_ptr<Block> own_;
  int64_t id_;
  std::vector<Mapping> peers_;
  std::vector<void*> bases_;
};

// The shared memory of a group, by address. Entries vanish when their memory is freed. Thread-safe.
class Windows {
 public:
  void add(const std::shared_ptr<Shared>& shared);
  // The window that holds [data, data + bytes), kept alive by `keep`; id 0 if there is none. `peers` gets the addresses of
  // the same bytes in the ranks' blocks.
  Window find(const void* data, int64_t bytes, std::shared_ptr<Shared>& keep, std::vector<void*>& peers);
  int64_t next_id() { return ++last_id_; }

 private:
  std::mutex mutex_;
  std::map<const uint8_t*, std::weak_ptr<Shared>> entries_;  // by the address of the own part
  int64_t last_id_ = 0;
};

}  // namespace gossamer::shm
