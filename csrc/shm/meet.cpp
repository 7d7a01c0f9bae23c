// The handshake; see meet.h. The lowest rank of a host leads: it creates the memory and sends it to the others.
#include "shm/meet.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "base/check.h"
#include "shm/region.h"

namespace gossamer::shm {
namespace {

constexpr auto kAfterwards = std::chrono::milliseconds(300);
constexpr size_t kCoreBytes = 1024;  // 8192 cores

struct Hello {  // to the leader
  int32_t rank;
  uint8_t cores[kCoreBytes];  // a bit for each core that the rank may run on
};
struct Welcome {  // from the leader, with the memory
  int32_t local;
  int32_t size;
  uint64_t proof;  // the same number stands in the header
};
struct Proof {  // to the leader; the same number stands in the rank's slot
  uint64_t proof;
};

std::string peer_name(int rank) { return "rank " + std::to_string(rank); }

// The value that rank `rank` has put into the store.
std::string ask(Store& store, const char* key, int rank, Deadline deadline) {
  try {
    return store.get(key + std::string("/") + std::to_string(rank), deadline);
  } catch (const std::exception& error) {
    raise(ErrorKind::comm, "meeting of the ranks: ", peer_name(rank), " has not come: ", error.what());
  }
}

uint64_t random_number() { return std::stoull(random_name().substr(0, 15), nullptr, 16) + 1; }

void own_cores(uint8_t* bits) {
  std::memset(bits, 0, kCoreBytes);
  if (sched_getaffinity(0, kCoreBytes, reinterpret_cast<cpu_set_t*>(bits)) != 0) bits[0] = 1;
}

int count_bits(const uint8_t* bits) {
  return std::accumulate(bits, bits + kCoreBytes, 0,
                         [](int sum, uint8_t byte) { return sum + __builtin_popcount(byte); });
}

// The lowest rank whose socket this rank can reach, and the socket to it; this rank itself if there is none.
int find_leader(Store& store, int rank, Deadline deadline, Socket& socket) {
  for (int candidate = 0; candidate < rank; ++candidate) {
    auto found = connect(ask(store, "socket", candidate, deadline));
    if (!found) continue;
    const uid_t user = found->peer_user();
    GOSSAMER_CHECK(user == geteuid(), ErrorKind::comm, "shared memory: rank ", rank, " runs as user ",
                   geteuid(), " and ", peer_name(candidate), " on the same host as user ", user,
                   "; ranks of a host must run as one user");
    socket = std::move(*found);
    return candidate;
  }
  return rank;
}

std::vector<std::vector<int>> hosts_of(const std::vector<int>& leaders) {
  std::vector<std::vector<int>> hosts;
  std::vector<int> index(leaders.size(), -1);
  for (size_t rank = 0; rank < leaders.size(); ++rank) {
    const size_t leader = static_cast<size_t>(leaders[rank]);
    if (leader == rank) {
      index[rank] = static_cast<int>(hosts.size());
      hosts.emplace_back();
    }
    GOSSAMER_CHECK(leader <= rank && index[leader] >= 0, ErrorKind::comm, "shared memory: ", peer_name(rank),
                   " reaches rank ", leader, ", which reaches rank ", leaders[leader],
                   ", but not that one; ranks of a host must all reach each other");
    hosts[index[leader]].push_back(static_cast<int>(rank));
  }
  return hosts;
}

// Connections of the other local ranks, by place. Strangers who found the name are turned away.
std::vector<Socket> greet(const Listener& listener, const std::vector<int>& local_ranks, uint8_t* cores,
                          Deadline deadline) {
  std::vector<Socket> sockets(local_ranks.size());
  for (size_t greeted = 1; greeted < local_ranks.size();) {
    Socket socket = listener.accept(deadline);
    if (!socket) {
      const auto missing = std::find_if(sockets.begin() + 1, sockets.end(), [](auto& s) { return !s; });
      GOSSAMER_CHECK(false, ErrorKind::comm,
                     "shared memory: ", peer_name(local_ranks[missing - sockets.begin()]),
                     " does not answer");
    }
    if (socket.peer_user() != geteuid()) continue;
    Hello hello;
    socket.receive(&hello, sizeof(hello), 0, deadline, "a rank of this host");
    const auto found = std::find(local_ranks.begin(), local_ranks.end(), hello.rank);
    if (found == local_ranks.end()) continue;
    for (size_t i = 0; i < kCoreBytes; ++i) cores[i] |= hello.cores[i];
    sockets[found - local_ranks.begin()] = std::move(socket);
    ++greeted;
  }
  return sockets;
}

Slot& slot_of(const Mapping& region, const Layout& layout, int local) {
  return *reinterpret_cast<Slot*>(region.data() + layout.slot(local));
}

void lead(Meeting& meeting, const Listener& listener, Deadline deadline) {
  const auto& ranks = meeting.hosts[meeting.host];
  const int size = static_cast<int>(ranks.size());
  uint8_t cores[kCoreBytes];
  own_cores(cores);
  meeting.sockets = greet(listener, ranks, cores, deadline);

  const Layout layout(size);
  meeting.region = Mapping::create(layout.bytes);
  auto& header = *new (meeting.region.data()) Header();
  header.proof = random_number();
  header.size = size;
  header.cores = count_bits(cores);
  for (int local = 0; local < size; ++local) {
    auto& slot = *new (meeting.region.data() + layout.slot(local)) Slot();
    slot.rank = ranks[local];
  }
  for (int local = 1; local < size; ++local) {
    const Welcome welcome{local, size, header.proof};
    meeting.sockets[local].send(&welcome, sizeof(welcome), {meeting.region.fd()}, deadline,
                                peer_name(ranks[local]));
  }
  for (int local = 1; local < size; ++local) {
    Proof proof;
    meeting.sockets[local].receive(&proof, sizeof(proof), 0, deadline, peer_name(ranks[local]));
    const uint64_t seen = slot_of(meeting.region, layout, local).proof;
    GOSSAMER_CHECK(seen == proof.proof, ErrorKind::comm, "shared memory: ", peer_name(ranks[local]),
                   " wrote ", proof.proof, " into memory where rank ", ranks[0], " reads ", seen,
                   "; the two do not share it");
  }
  for (int local = 1; local < size; ++local) {
    const Proof done{header.proof};
    meeting.sockets[local].send(&done, sizeof(done), {}, deadline, peer_name(ranks[local]));
  }
}

void join(Meeting& meeting, Socket leader, Deadline deadline) {
  const auto& ranks = meeting.hosts[meeting.host];
  const std::string peer = peer_name(ranks[0]);
  Welcome welcome;
  auto fds = leader.receive(&welcome, sizeof(welcome), 1, deadline, peer);
  const Layout layout(static_cast<int>(ranks.size()));
  meeting.region = Mapping::attach(std::move(fds[0]), layout.bytes);
  const auto& header = *reinterpret_cast<const Header*>(meeting.region.data());
  GOSSAMER_CHECK(
      header.proof == welcome.proof && header.size == layout.size && welcome.local == meeting.local,
      ErrorKind::comm, "shared memory: ", peer, " says that its memory begins with ", welcome.proof,
      ", but it begins with ", header.proof, "; the two do not share it");
  Proof proof{random_number()};
  slot_of(meeting.region, layout, meeting.local).proof = proof.proof;
  leader.send(&proof, sizeof(proof), {}, deadline, peer);
  leader.receive(&proof, sizeof(proof), 0, deadline, peer);
  meeting.sockets.push_back(std::move(leader));
}

// The first rank's reason, if it has given one; otherwise what this rank saw.
std::string reason_of(Store& store, const std::string& key, const std::string& seen) {
  try {
    return store.get(key, Clock::now() + kAfterwards);
  } catch (const std::exception&) {
    return seen;
  }
}

}  // namespace

Meeting meet(Store& store, int rank, int size, Deadline deadline) {
  const Listener listener;
  store.set("socket/" + std::to_string(rank), listener.name());
  Socket socket;
  const int leader = find_leader(store, rank, deadline, socket);
  if (socket) {
    Hello hello{rank, {}};
    own_cores(hello.cores);
    socket.send(&hello, sizeof(hello), {}, deadline, peer_name(leader));
  }
  store.set("leader/" + std::to_string(rank), std::to_string(leader));
  std::vector<int> leaders;
  for (int peer = 0; peer < size; ++peer) {
    leaders.push_back(std::stoi(ask(store, "leader", peer, deadline)));
  }

  Meeting meeting;
  meeting.name = ask(store, "socket", 0, deadline);
  meeting.hosts = hosts_of(leaders);
  for (size_t host = 0; host < meeting.hosts.size(); ++host) {
    const auto& ranks = meeting.hosts[host];
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found == ranks.end()) continue;
    meeting.host = static_cast<int>(host);
    meeting.local = static_cast<int>(found - ranks.begin());
  }
  const size_t local_size = meeting.hosts[meeting.host].size();
  GOSSAMER_CHECK(local_size <= kMaxLocalRanks, ErrorKind::comm, "shared memory: at most ", kMaxLocalRanks,
                 " ranks of a group may share a host, got ", local_size);
  const std::string failure = "failure/" + std::to_string(leader);
  if (meeting.local == 0) {
    try {
      lead(meeting, listener, deadline);
    } catch (const Error& error) {
      store.set(failure, error.what());  // the other ranks see only that this one is gone
      throw;
    }
  } else {
    try {
      join(meeting, std::move(socket), deadline);
    } catch (const Error& error) {
      raise(error.kind, reason_of(store, failure, error.what()));
    }
  }
  meeting.region.close_fd();
  return meeting;
}

void forget(Store& store, int rank) {
  store.remove("socket/" + std::to_string(rank));
  store.remove("leader/" + std::to_string(rank));
}

}  // namespace gossamer::shm
