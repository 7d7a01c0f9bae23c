// See hosts.h: agreement, transfer between hosts, and failures. The collectives are in hosts_collectives.cpp.
#include "backend/hosts.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <thread>
#include <utility>

#include "errors.h"
#include "shm/pieces.h"

namespace gossamer {
namespace {

constexpr auto kLook = std::chrono::milliseconds(100);
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
    if (store_->check({"failed"})) {
      const auto first = store_->get("failed");
      reason = std::string(first.begin(), first.end());
    }
  } catch (const std::exception&) {
    reason += "; the store does not answer either";
  }
  announce(reason);
  raise_python(ErrorKind::comm, reason);
}

void Hosts::announce(const std::string& reason) noexcept {
  try {
    local_.abort(reason);
    if (!store_->check({"failed"})) store_->set("failed", std::vector<uint8_t>(reason.begin(), reason.end()));
  } catch (const std::exception&) {
    // Whoever hosts the store is gone; the others will notice that.
  }
}

// Waits for a work of Gloo, and looks meanwhile whether any rank of any host has failed.
void Hosts::wait(c10d::Work& work, shm::Deadline deadline) {
  while (true) {
    try {
      work.wait(kLook);
      return;
    } catch (const std::exception& error) {
      if (work.isCompleted()) {
        if (work.isSuccess()) return;
        raise(ErrorKind::comm, "between hosts, on rank ", rank_, ": ", first_line(error.what()), "; ",
              place_.roll_call.silent_ranks());
      }
    }
    gave_up_ = true;  // also if the store does not answer
    if (store_->check({"failed"})) raise(ErrorKind::comm, "a rank of another host has failed");
    place_.roll_call.answer_if_asked();
    for (int peer = 0; peer < local_.size(); ++peer) {
      const std::string why = local_.trouble(peer);
      if (!why.empty()) raise(ErrorKind::comm, why);
    }
    if (shm::Clock::now() > deadline) {
      raise(ErrorKind::comm, "between hosts, on rank ", rank_, ": Timed out; ",
            place_.roll_call.silent_ranks());
    }
    gave_up_ = false;
  }
}

void Hosts::transfer(const std::vector<Part>& sends, const std::vector<Part>& receives,
                     shm::Deadline deadline) {
  const auto total = [](const std::vector<Part>& parts, std::vector<int64_t>& by_rank) {
    int64_t sum = 0;
    for (const auto& part : parts) {
      by_rank[part.peer] += part.bytes;
      sum += part.bytes;
    }
    return sum;
  };
  std::vector<int64_t> send_bytes(size_);
  std::vector<int64_t> receive_bytes(size_);
  at::Tensor out = byte_tensor(total(sends, send_bytes));
  at::Tensor in = byte_tensor(total(receives, receive_bytes));
  // The position of each peer's first part in each of the two tensors.
  const auto starts = [this](const std::vector<int64_t>& bytes) {
    std::vector<int64_t> positions(size_);
    for (int rank = 1; rank < size_; ++rank) positions[rank] = positions[rank - 1] + bytes[rank - 1];
    return positions;
  };
  auto position = starts(send_bytes);
  for (const auto& part : sends) {
    shm::copy(shm::at(out.data_ptr(), position[part.peer]), part.data, part.bytes);
    position[part.peer] += part.bytes;
  }
  auto from = starts(receive_bytes);
  c10d::AllToAllOptions options;
  options.timeout =
      std::max(std::chrono::milliseconds(1),
               std::chrono::duration_cast<std::chrono::milliseconds>(deadline - shm::Clock::now())) +
      std::chrono::seconds(1);
  wait(*gloo_->alltoall_base(in, out, receive_bytes, send_bytes, options), deadline);
  for (const auto& part : receives) {
    shm::copy(part.data, shm::at(in.data_ptr(), from[part.peer]), part.bytes);
    from[part.peer] += part.bytes;
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

std::string Hosts::exchange(std::vector<Entry>& entries, CallAcross& call) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<std::vector<at::Tensor>> theirs(entries.size());
  std::vector<at::Tensor> own{byte_tensor(sizeof(Entry))};
  std::memcpy(own[0].data_ptr(), &entries[local_.host()], sizeof(Entry));
  try {
    for (const bool receives : {true, false}) {  // all receives first, see comm/c10d.cpp
      for (int host = 0; host < host_count(); ++host) {
        if (host == local_.host()) continue;
        const int peer = ranks_of(host)[0];
        if (receives) theirs[host] = {byte_tensor(sizeof(Entry))};
        works.push_back(receives ? gloo_->recv(theirs[host], peer, call.tag_of_number())
                                 : gloo_->send(own, peer, call.tag_of_number()));
      }
    }
    for (const auto& work : works) call.wait(*work);
  } catch (const CallsDiffer& error) {
    left_.insert(left_.end(), works.begin(), works.end());
    return error.what();
  } catch (const std::exception& error) {
    left_.insert(left_.end(), works.begin(), works.end());
    raise(ErrorKind::comm, "between hosts, on rank ", rank_, ": ", first_line(error.what()), "; ",
          place_.roll_call.silent_ranks());
  }
  for (int host = 0; host < host_count(); ++host)
    if (host != local_.host()) std::memcpy(&entries[host], theirs[host][0].data_ptr(), sizeof(Entry));
  return {};
}

void Hosts::compare(const shm::Call& call, shm::Deadline deadline, const std::string& refusal) {
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
    if (const auto error = exchange(entries, across); !error.empty()) refuse(entries[0], error);
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
}

}  // namespace gossamer
