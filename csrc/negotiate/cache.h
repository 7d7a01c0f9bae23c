// The response cache, both sides of it. Every rank keeps a Cache of what was agreed. Only decisions fill and drop its
// slots, so all ranks hold the same. The coordinator also keeps Slots: the request of each rank that a bit stands for, and
// which slot is given up when all are taken (the longest unused). If a slot changes while a bit is on its way, the bit's
// age shows it: the bit is ignored, and its sender submits the request in full.
#pragma once

#include <unordered_map>

#include "negotiate/check.h"

namespace gossamer::negotiate {

class Cache {
 public:
  // The slot of an agreement that is valid for `request`, or -1.
  int32_t find(const Request& request) const;
  // Throws Error(comm) if the slot is empty.
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

  // Whether a bit from a rank that had seen `seen` decisions means the slot's present occupant.
  bool current(int32_t slot, uint64_t seen) const;
  const std::shared_ptr<const Request>& request(int32_t slot, int rank) const {
    return slots_[slot].requests[rank];
  }
  const std::shared_ptr<const Response>& response(int32_t slot) const { return slots_[slot].response; }

  void wait(int32_t slot) { slots_[slot].waits = true; }  // a bit has come: the slot must not be given up
  void use(int32_t slot, uint64_t sequence);              // the slot's operation runs in that decision
  void release(const std::string& name);                  // the operation that the bit waited for is over

  // Puts `response` into the slot of its name, else into a free one, else into the one unused for longest, and sets its
  // slot number; -1 if all slots are busy.
  void store(const std::shared_ptr<Response>& response, Requests requests, uint64_t sequence);
  // Drops the agreement with this name; returns its slot, or -1.
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
