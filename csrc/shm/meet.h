// How the ranks of a group find out which of them share a host, and get the shared memory of those. Locality is proven,
// never assumed: two ranks are on one host if one can reach the other's socket, gets a descriptor from it, and both see in
// the mapped memory the number that the other says it wrote. Called once, by group.cpp.
#pragma once

#include <string>
#include <vector>

#include "shm/memory.h"
#include "shm/socket.h"

namespace gossamer::shm {

// The group's key-value store, shared by all its ranks on all hosts.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits for the key; throws if it does not come.
  virtual std::string get(const std::string& key, Deadline deadline) = 0;
  virtual void remove(const std::string& key) noexcept = 0;
};

struct Meeting {
  std::string name;  // equal on all ranks; no other meeting has it
  // The ranks of each host, ascending; hosts in the order of their first ranks.
  std::vector<std::vector<int>> hosts;
  int host = 0;                 // this rank's
  int local = 0;                // its place in hosts[host]
  Mapping region;               // see region.h
  std::vector<Socket> sockets;  // the first rank of a host: to each local rank; the others: to the first
};

// Collective. Throws Error(comm) that names the rank whose answer did not come.
Meeting meet(Store& store, int rank, int size, Deadline deadline);

// Called once all ranks have met: removes this rank's keys from the store, where a later group may use them again.
void forget(Store& store, int rank);

}  // namespace gossamer::shm
