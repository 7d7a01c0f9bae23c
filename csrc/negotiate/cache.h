// The response cache, both sides of it. Every rank keeps a Cache of what was agreed; its slots are filled and dropped by
// the decisions alone, so that all ranks hold the same. The coordinator also keeps Slots: which request of which rank
// a bit stands for, and which slot gives way when all are taken (the longest unused). A slot that changes while a
// bit is on its way: the bit is recognised by its age and ignored, and its sender submits the request in full.
#pragma once

#include <unordered_map>

#include "negotiate/check.h"

namespace gossamer::negotiate {

class Cache {
 public:
  // The slot of an agreement that holds for `request`, or -1.
  int32_t find(const Request& request) const;
  // Throws Error(comm) where nothing is cached.
  const std::shared_ptr<const Response>& at(int32_t slot) const;
  void store(std::shared_ptr<const Response> response, std::shared_ptr<const Request> own);
  void drop(int32_t slot);

 private:
  struct Entry {
    std::shared_ptr<const Response> response;  // null: free
    std::shared_ptr<const Request> own;
  };
  std::vector<Entry> entries_;
  std::unordered_map<std::string, int32_t> slots_;  // by name
};

class Slots {
 public:
  explicit Slots(int capacity) : capacity_(capacity) {}

  // Whether a bit of a rank that had seen `seen` decisions means the present occupant.
  bool current(int32_t slot, uint64_t seen) const;
  const std::shared_ptr<const Request>& request(int32_t slot, int rank) const {
    return slots_[slot].requests[rank];
  }
  const std::shared_ptr<const Response>& response(int32_t slot) const { return slots_[slot].response; }

  void wait(int32_t slot) { slots_[slot].waits = true; }  // a bit has come: not to be taken from it
  void use(int32_t slot, uint64_t sequence);              // runs in that decision
  void release(const std::string& name);                  // what the bit waited for is over

  // The slot of this name, else a free one, else the one unused for longest; -1 if all are busy. Its new occupant is
  // `response`, which learns its slot.
  void store(const std::shared_ptr<Response>& response, Requests requests, uint64_t sequence);
  // Drops the agreement under this name; returns the slot it had, or -1.
  int32_t drop(const std::string& name, uint64_t sequence);

 private:
  struct Slot {
    std::shared_ptr<const Response> response;  // null: free
    Requests requests;
    uint64_t changed = 0;  // the decisions that made its occupant, and used it last
    uint64_t used = 0;
    bool waits = false;
  };
  int32_t place(const std::string& name, uint64_t sequence);

  int capacity_;
  std::vector<Slot> slots_;
  std::vector<int32_t> free_;
  std::unordered_map<std::string, int32_t> names_;
};

}  // namespace gossamer::negotiate
