// Ranks as threads for the tests and the benchmark of negotiate/: a network of queues, an executor in which all ranks meet
// as they would in a blocking collective, and a Fleet of negotiators over both.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "negotiate/negotiator.h"

namespace gossamer::test {

using namespace negotiate;

class Network {
 public:
  explicit Network(int size) : boxes_(size) {}

  class Endpoint : public Transport {
   public:
    Endpoint(std::shared_ptr<Network> network, int rank) : network_(std::move(network)), rank_(rank) {}
    void send(int to, const Bytes& message) override { network_->send(rank_, to, message); }
    bool receive(Received& received, Clock::time_point deadline) override {
      return network_->receive(rank_, received, deadline);
    }
    void wake() noexcept override { network_->wake(rank_); }

   private:
    std::shared_ptr<Network> network_;
    int rank_;
  };

  // Cuts this rank off: nothing reaches it or leaves it. Its peers notice it as they would notice the end of a process.
  void kill(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    boxes_[rank].dead = true;
    for (Box& box : boxes_) box.news.notify_all();
  }

 private:
  struct Box {
    std::deque<Received> mail;
    bool woken = false;
    bool dead = false;
    std::condition_variable news;
  };

  void send(int from, int to, const Bytes& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (boxes_[from].dead) raise(ErrorKind::comm, "the network: this rank is cut off");
    if (boxes_[to].dead) raise(ErrorKind::comm, "the network: rank ", to, " is lost");
    boxes_[to].mail.push_back({from, message});
    boxes_[to].news.notify_all();
  }
  bool receive(int rank, Received& received, Clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    Box& box = boxes_[rank];
    while (true) {
      if (box.dead) raise(ErrorKind::comm, "the network: this rank is cut off");
      if (!box.mail.empty()) {
        received = std::move(box.mail.front());
        box.mail.pop_front();
        return true;
      }
      for (int peer = 0; peer < static_cast<int>(boxes_.size()); ++peer) {
        if (boxes_[peer].dead && (rank == 0 || peer == 0))
          raise(ErrorKind::comm, "the network: rank ", peer, " is lost");
      }
      if (std::exchange(box.woken, false)) return false;
      if (deadline <= Clock::now()) return false;
      box.news.wait_until(lock, deadline);
    }
  }
  void wake(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    boxes_[rank].woken = true;
    boxes_[rank].news.notify_all();
  }

  std::mutex mutex_;
  std::deque<Box> boxes_;
};

// All ranks meet here with every batch, and must bring the same one.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}

  void meet(const std::string& batch) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (arrived_ == 0) batch_ = batch;
    if (batch != batch_) different_ = "one rank runs " + batch_ + ", another " + batch;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      news_.notify_all();
    } else {
      const bool met =
          news_.wait_for(lock, std::chrono::seconds(10), [&, round = round_] { return round_ != round; });
      if (!met) raise(ErrorKind::comm, "the meeting: not all ranks came with ", batch);
    }
    if (!different_.empty()) raise(ErrorKind::comm, "the meeting: ", different_);
  }

 private:
  int size_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::string batch_, different_;
  int arrived_ = 0;
  int round_ = 0;
};

using Batches = std::vector<std::vector<std::string>>;  // names

inline Request request_of(Collective kind, std::string name, std::vector<int64_t> shape = {4}) {
  Request request;
  request.kind = kind;
  request.name = std::move(name);
  request.dtype = "float32";
  request.device = "cpu";
  request.element_bytes = 4;
  request.shape = std::move(shape);
  return request;
}

using Pending = std::future<Result>;

class Fleet {
 public:
  using OptionsOf = std::function<void(int rank, Options&)>;
  explicit Fleet(int size, const OptionsOf& adapt = nullptr)
      : network(std::make_shared<Network>(size)), meeting(std::make_shared<Meeting>(size)), batches(size) {
    for (int rank = 0; rank < size; ++rank) {
      Options options;
      if (adapt) adapt(rank, options);
      ranks.push_back(std::make_unique<Negotiator>(
          rank, size, std::make_unique<Network::Endpoint>(network, rank),
          [this, rank](const std::vector<Part>& parts) { execute(rank, parts); }, options));
    }
  }
  ~Fleet() {
    std::vector<std::thread> threads;
    for (auto& rank : ranks) threads.emplace_back([&] { rank.reset(); });
    for (auto& thread : threads) thread.join();
  }

  Pending submit(int rank, Request request) {
    ranks[rank]->waited();  // names are free as soon as they are complete
    auto [operation, pending] = operation_of(std::move(request));
    ranks[rank]->submit(std::move(operation));
    return std::move(pending);
  }
  std::vector<Pending> submit_group(int rank, const std::vector<Request>& requests,
                                    const std::string& group) {
    ranks[rank]->waited();
    std::vector<Operation> operations;
    std::vector<Pending> pending;
    for (const Request& request : requests) {
      auto [operation, one] = operation_of(request);
      operations.push_back(std::move(operation));
      pending.push_back(std::move(one));
    }
    ranks[rank]->submit_group(std::move(operations), group);
    return pending;
  }
  // The same request on every rank.
  std::vector<Pending> everywhere(const Request& request) {
    std::vector<Pending> pending;
    for (int rank = 0; rank < size(); ++rank) pending.push_back(submit(rank, request));
    return pending;
  }
  int size() const { return static_cast<int>(ranks.size()); }

  std::shared_ptr<Network> network;
  std::shared_ptr<Meeting> meeting;
  std::vector<Batches> batches;  // by rank; read it when the rank is idle
  std::function<void(int rank, const std::vector<Part>& parts)> on_batch;
  std::vector<std::unique_ptr<Negotiator>> ranks;

 private:
  static std::pair<Operation, Pending> operation_of(Request request) {
    auto promise = std::make_shared<std::promise<Result>>();
    Pending pending = promise->get_future();
    return {Operation{std::move(request), nullptr,
                      [promise](const Result& result) { promise->set_value(result); }, -1},
            std::move(pending)};
  }
  void execute(int rank, const std::vector<Part>& parts) {
    std::vector<std::string> names;
    std::string all;
    for (const Part& part : parts) {
      names.push_back(part.response->request.name);
      all += names.back() + " ";
    }
    batches[rank].push_back(std::move(names));
    meeting->meet(all);
    if (on_batch) on_batch(rank, parts);
  }
};

}  // namespace gossamer::test
