// See hosts.h: agreement, transfer between hosts, and failures. The collectives are in hosts_collectives.cpp.
#include "backend/hosts.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "backend/announced.h"
#include "backend/messages.h"
#include "errors.h"
#include "shm/pieces.h"

namespace gossamer {
namespace {

at::Tensor byte_tensor(int64_t bytes) { return at::empty({bytes}, at::TensorOptions().dtype(at::kByte)); }

}  // namespace

struct Hosts::Entry {  // the call that one host is about to make
  shm::Call call;
  char trouble[shm::kReasonBytes];  // why its ranks do not agree; empty if they do
};

Hosts::Hosts(shm::Group& local, c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
             int rank, int size)
    : local_(local),
      gloo_(std::move(gloo)),
      store_(std::move(store)),
      rank_(rank),
      size_(size),
      place_{store_, {store_, rank, size}, local_, {}} {
  CallAcross::prepare(place_);
  host_of_.resize(size);
  place_of_.resize(size);
  for (int host = 0; host < host_count(); ++host) {
    for (size_t place = 0; place < ranks_of(host).size(); ++place) {
      host_of_[ranks_of(host)[place]] = host;
      place_of_[ranks_of(host)[place]] = static_cast<int>(place);
    }
  }
}

Hosts::~Hosts() {
  // Leaked: its destructor would wait for an operation that cannot end.
  if (gave_up_ || !left_.empty()) gloo_.release();
}

void Hosts::run(const std::function<void()>& body) {
  try {
    body();
  } catch (const CallsDiffer& error) {
    throw Error(ErrorKind::config, error.what());
  } catch (const Error& error) {
    if (error.kind != ErrorKind::comm) throw;
    fail(error.what());
  } catch (const std::exception& error) {
    fail("rank " + std::to_string(rank_) + " has failed: " + first_line(error.what()));
  }
}

void Hosts::fail(std::string reason) {
  gave_up_ = true;
  try {
    if (const auto first = announced(*store_, kFailed); !first.empty()) reason = first;
  } catch (const std::exception&) {
    reason += "; the store does not answer either";
  }
  announce(reason);
  raise_python(ErrorKind::comm, reason);
}

void Hosts::announce(const std::string& reason) noexcept {
  try {
    local_.abort(reason);
    gossamer::announce(*store_, kFailed, reason);
  } catch (const std::exception&) {
    // Whoever hosts the store is gone; the others will notice that.
  }
}

// Each rank begins at another peer.
void Hosts::exchange(const Buffers& out, const Buffers& in, int tag, CallAcross& call) {
  std::vector<Message> incoming, outgoing;
  for (int apart = 1; apart < size_; ++apart) {
    const int source = (rank_ + size_ - apart) % size_, to = (rank_ + apart) % size_;
    if (in[source].defined()) incoming.push_back({{in[source]}, source});
    if (out[to].defined()) outgoing.push_back({{out[to]}, to});
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  const auto leave = [&] { left_.insert(left_.end(), works.begin(), works.end()); };
  try {
    post_messages(*gloo_, incoming, outgoing, tag, works);
    for (const auto& work : works) call.wait(*work);
  } catch (const CallsDiffer&) {
    leave();
    throw;
  } catch (const std::exception& error) {
    leave();
    raise(ErrorKind::comm, "between hosts, on rank ", rank_, ": ", first_line(error.what()), "; ",
          place_.roll_call.silent_ranks());
  }
}

void Hosts::transfer(const std::vector<Part>& sends, const std::vector<Part>& receives, CallAcross& call) {
  const auto buffers = [this](const std::vector<Part>& parts) {
    std::vector<int64_t> bytes(size_);
    for (const auto& part : parts) bytes[part.peer] += part.bytes;
    Buffers made(size_);
    for (int peer = 0; peer < size_; ++peer)
      if (bytes[peer] > 0) made[peer] = byte_tensor(bytes[peer]);
    return made;
  };
  // copy(place in the buffer, part) for each part.
  const auto each = [this](Buffers& of, const std::vector<Part>& parts, const auto& copy) {
    std::vector<int64_t> position(size_);
    for (const auto& part : parts) {
      if (part.bytes == 0) continue;
      copy(shm::at(of[part.peer].data_ptr(), position[part.peer]), part);
      position[part.peer] += part.bytes;
    }
  };
  Buffers out = buffers(sends), in = buffers(receives);
  each(out, sends, [](void* place, const Part& part) { shm::copy(place, part.data, part.bytes); });
  in[rank_] = out[rank_];
  exchange(out, in, call.tag(), call);
  each(in, receives, [](void* place, const Part& part) { shm::copy(part.data, place, part.bytes); });
}

void Hosts::finish(CallAcross& call, shm::Deadline deadline, const std::function<void()>& across,
                   const std::function<void()>& inside) {
  std::string difference;
  try {
    across();
  } catch (const CallsDiffer& error) {
    difference = error.what();
  }
  try {
    if (difference.empty()) return inside();
    local_.refuse(difference, deadline);
    local_.compare();
  } catch (const Error& error) {
    if (error.kind != ErrorKind::config) throw;
    throw Error(ErrorKind::config, call.differ(error.what()));
  }
}

std::string Hosts::compare_here(const shm::Call& call, shm::Deadline deadline, const std::string& refusal) {
  try {
    if (refusal.empty()) {
      local_.begin(call, deadline);
      local_.meet();
    } else {
      local_.refuse(refusal, deadline);
    }
    local_.compare();
    return {};
  } catch (const Error& error) {
    if (error.kind != ErrorKind::config) throw;
    return error.what();
  }
}

CallAcross Hosts::compare(const shm::Call& call, shm::Deadline deadline, const std::string& refusal) {
  CallAcross across(place_, ++number_, call, deadline);
  std::vector<Entry> entries(host_count());
  const auto refuse = [](Entry& entry, const std::string& text) {
    entry.trouble[text.copy(entry.trouble, sizeof(entry.trouble) - 1)] = 0;
  };
  Entry& own = entries[local_.host()];
  if (const auto trouble = compare_here(call, deadline, refusal); !trouble.empty())
    refuse(own, across.differ(trouble));
  own.call = local_.call_of(0);
  if (local_.rank() == 0) {
    Buffers out(size_), in(size_);
    for (int host = 0; host < host_count(); ++host) {
      if (host == local_.host()) continue;
      const int peer = ranks_of(host)[0];
      out[peer] = byte_tensor(sizeof(Entry));
      in[peer] = byte_tensor(sizeof(Entry));
      std::memcpy(out[peer].data_ptr(), &own, sizeof(Entry));
    }
    try {
      exchange(out, in, across.tag_of_number(), across);
      for (int host = 0; host < host_count(); ++host)
        if (host != local_.host())
          std::memcpy(&entries[host], in[ranks_of(host)[0]].data_ptr(), sizeof(Entry));
    } catch (const CallsDiffer& error) {
      refuse(entries[0], error.what());
    }
  }
  shm::broadcast(local_, entries.data(), static_cast<int64_t>(entries.size() * sizeof(Entry)), 0, deadline);
  for (const Entry& entry : entries) {
    if (entry.trouble[0]) raise(ErrorKind::config, entry.trouble);
  }
  for (int host = 1; host < host_count(); ++host) {
    if (shm::alike(entries[host].call, entries[0].call)) continue;
    throw Error(ErrorKind::config, shm::describe_difference(entries[0].call, ranks_of(0)[0],
                                                            entries[host].call, ranks_of(host)[0]));
  }
  return across;
}

CallAcross Hosts::enter(const shm::Call& call, shm::Deadline deadline) {
  if (call.count == 0) return compare(call, deadline);  // no data moves
  CallAcross across(place_, ++number_, call, deadline);
  if (const auto trouble = compare_here(call, deadline, {}); !trouble.empty())
    throw Error(ErrorKind::config, across.differ(trouble));
  return across;
}

}  // namespace gossamer
