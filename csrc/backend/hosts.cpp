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
constexpr auto kRollCall = std::chrono::milliseconds(500);  // a waiting rank looks several times in it
const std::string kRollCallKey = "roll call";

std::string present(int rank) { return "here/" + std::to_string(rank); }

struct Entry {  // the call that one host is about to make
  shm::Call call;
  char trouble[shm::kReasonBytes];  // why its ranks do not agree; empty if they do
};

at::Tensor byte_tensor(int64_t bytes) { return at::empty({bytes}, at::TensorOptions().dtype(at::kByte)); }

}  // namespace

Hosts::Hosts(shm::Group& local, c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
             int rank, int size)
    : local_(local), gloo_(std::move(gloo)), store_(std::move(store)), rank_(rank), size_(size) {
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
  if (gave_up_) gloo_.release();  // leaked: its destructor would wait for an operation that cannot end
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
              silent_ranks());
      }
    }
    gave_up_ = true;  // also if the store does not answer
    if (store_->check({"failed"})) raise(ErrorKind::comm, "a rank of another host has failed");
    if (store_->check({kRollCallKey})) answer_roll_call();
    for (int peer = 0; peer < local_.size(); ++peer) {
      const std::string why = local_.trouble(peer);
      if (!why.empty()) raise(ErrorKind::comm, why);
    }
    if (shm::Clock::now() > deadline) {
      raise(ErrorKind::comm, "between hosts, on rank ", rank_, ": Timed out; ", silent_ranks());
    }
    gave_up_ = false;
  }
}

void Hosts::answer_roll_call() { store_->set(present(rank_), std::vector<uint8_t>{1}); }

std::string Hosts::silent_ranks() {
  std::string silent;
  try {
    answer_roll_call();
    store_->set(kRollCallKey, std::vector<uint8_t>{1});
    const auto until = shm::Clock::now() + kRollCall;
    do {
      if (store_->check({"failed"})) return "another rank has said why";
      silent.clear();
      for (int rank = 0; rank < size_; ++rank) {
        if (!store_->check({present(rank)}))
          silent += (silent.empty() ? "rank " : ", ") + std::to_string(rank);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    } while (!silent.empty() && shm::Clock::now() < until);
  } catch (const std::exception&) {
    return "the store does not answer either";
  }
  return silent.empty() ? "every rank answers" : "silent: " + silent;
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

void Hosts::compare(const shm::Call& call, shm::Deadline deadline, const std::string& refusal) {
  std::vector<Entry> entries(host_count());
  Entry& own = entries[local_.host()];
  try {
    if (refusal.empty()) {
      local_.begin(call, deadline);
      local_.meet();
    } else {
      local_.refuse(refusal, deadline);
    }
    own.call = local_.call_of(0);
    local_.compare();
  } catch (const Error& error) {
    if (error.kind != ErrorKind::config) throw;
    const std::string text = error.what();
    own.trouble[text.copy(own.trouble, sizeof(own.trouble) - 1)] = 0;
  }
  std::vector<Part> sends;
  std::vector<Part> receives;
  if (local_.rank() == 0) {
    for (int host = 0; host < host_count(); ++host) {
      if (host == local_.host()) continue;
      sends.push_back({&own, sizeof(Entry), ranks_of(host)[0]});
      receives.push_back({&entries[host], sizeof(Entry), ranks_of(host)[0]});
    }
  }
  transfer(sends, receives, deadline);
  shm::broadcast(local_, entries.data(), static_cast<int64_t>(entries.size() * sizeof(Entry)), 0, deadline);
  for (const Entry& entry : entries) {
    if (entry.trouble[0]) raise(ErrorKind::config, entry.trouble);
  }
  for (int host = 1; host < host_count(); ++host) {
    if (shm::alike(entries[host].call, entries[0].call)) continue;
    raise(ErrorKind::config, "every rank must make the same call, got ", shm::describe(entries[0].call),
          " on rank ", ranks_of(0)[0], " and ", shm::describe(entries[host].call), " on rank ",
          ranks_of(host)[0]);
  }
}

}  // namespace gossamer
