// The worker thread of negotiator.h.
#include "negotiate/negotiator.h"

#include <pthread.h>
#include <unistd.h>

#include <numeric>
#include <utility>

namespace gossamer::negotiate {
namespace {

constexpr int kWindowsToSkip = 8;    // windows to skip after one in which nothing came
constexpr int kLongestWindow = 100;  // the longest wait, in windows, while operations keep coming

std::vector<int> numbers_of(const std::vector<int>& ranks, int size) {
  if (!ranks.empty()) return ranks;
  std::vector<int> counted(size);
  std::iota(counted.begin(), counted.end(), 0);
  return counted;
}

}  // namespace

Negotiator::Negotiator(int rank, int size, std::unique_ptr<Transport> transport, Execute execute,
                       Options options)
    : rank_(rank),
      size_(size),
      owner_(getpid()),
      options_(std::move(options)),
      ranks_(numbers_of(options_.ranks, size)),
      transport_(std::move(transport)),
      execute_(std::move(execute)),
      inspector_(options_.stall) {
  GOSSAMER_CHECK(rank >= 0 && rank < size && static_cast<int>(ranks_.size()) == size, ErrorKind::config,
                 "negotiate: the rank must be in 0..size-1 and every rank must have a number, got rank ",
                 rank, " of ", size, " with ", ranks_.size(), " numbers");
  if (rank_ == 0) {
    coordinator_ = std::make_unique<Coordinator>(ranks_, options_.fusing, options_.cache_capacity);
  }
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "gossamer-nego");
}

Negotiator::~Negotiator() { shutdown(); }

void Negotiator::trace(Phase phase, const std::string& name, int rank) const {
  if (options_.trace) options_.trace({phase, name, rank, Clock::now()});
}

void Negotiator::run() noexcept {
  try {
    while (running_) step();
  } catch (const std::exception& error) {
    end(error.what(), true);
  } catch (...) {
    end("an exception of unknown type on the worker thread", true);
  }
}

void Negotiator::step() {
  Received received;
  bool any = transport_->receive(received, until());
  for (int taken = 0; any && running_; ++taken) {
    handle(std::move(received));
    any = taken < size_ && transport_->receive(received, Clock::time_point::min());
  }
  if (!running_) return;
  collect();
  if (coordinator_) lead();
  leave();
}

Clock::time_point Negotiator::until() {
  Clock::time_point at = leave_by_;
  if (window_seen_ > 0) at = std::min(at, window_end_);
  if (coordinator_) at = std::min(at, inspector_.next(coordinator_->table()));
  return std::min(at, Clock::now() + std::chrono::hours(1));
}

void Negotiator::handle(Received received) {
  Message message = decode(received.message);
  if (auto* decision = std::get_if<Decision>(&message); decision != nullptr && !coordinator_) {
    apply(std::move(*decision));
  } else if (auto* stop = std::get_if<Stop>(&message); stop != nullptr && !coordinator_) {
    end(stop->reason, false);
  } else if (!coordinator_ || received.from <= 0 || received.from >= size_) {
    raise(ErrorKind::comm, "negotiate: got a message that only rank 0 gets, from rank ", received.from);
  } else if (auto* submission = std::get_if<Submission>(&message)) {
    if (options_.trace) {
      for (const Request& request : submission->requests)
        trace(Phase::rank_ready, request.name, received.from);
    }
    coordinator_->take(received.from, std::move(*submission), Clock::now());
  } else if (auto* failure = std::get_if<Failure>(&message)) {
    if (stop_.empty()) stop_ = failure->reason;
  } else if (std::holds_alternative<Leave>(message)) {
    if (stop_.empty()) stop_ = "negotiate: rank " + std::to_string(ranks_[received.from]) + " has shut down";
  }
}

// Whether to wait for more operations of a burst. A burst is what is submitted between two moments with nothing in flight;
// `burst_` counts it. It is expected to be as large as the last one, and is waited for as long as it grows and no thread
// waits for its operations. So a single operation is never held back, except the first one after a burst. Where bursts come
// slowly, most windows are skipped.
bool Negotiator::hold(size_t queued, Clock::time_point now) {
  const auto take = [&] {
    window_seen_ = 0;
    burst_ += queued;
    return false;
  };
  if (std::exchange(hurries_, false) || stopping_) return take();
  if (window_seen_ == 0) {
    if (in_flight_.size() == queued) expected_ = std::exchange(burst_, 0);
    if (burst_ + queued >= expected_ || options_.window.count() == 0) return take();
    if (skip_windows_ > 0) {
      --skip_windows_;
      return take();
    }
    window_first_ = queued;
    window_opened_ = now;
  } else {
    if (burst_ + queued >= expected_) return take();
    if (now < window_end_) return true;
    if (queued == window_first_) skip_windows_ = kWindowsToSkip;
    if (queued == window_seen_ || now >= window_opened_ + kLongestWindow * options_.window) return take();
  }
  window_seen_ = queued;
  window_end_ = now + options_.window;
  wake_at_ = expected_ - burst_;
  return true;
}

void Negotiator::collect() {
  std::vector<Flight> taken;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || hold(queue_.size(), Clock::now())) return;
    taken.swap(queue_);
    wake_at_ = 1;
  }
  announce(taken);
}

void Negotiator::announce(const std::vector<Flight>& flights) {
  if (flights.empty()) return;
  Submission submission;
  submission.seen = seen_;
  for (const Flight& flight : flights) {
    flight->slot = cache_.find(flight->request);
    if (flight->slot < 0) {
      submission.requests.push_back(flight->request);
      continue;
    }
    const auto slot = static_cast<size_t>(flight->slot);
    if (submission.bits.size() <= slot / 64) submission.bits.resize(slot / 64 + 1);
    submission.bits[slot / 64] |= uint64_t{1} << slot % 64;
    if (bit_flights_.size() <= slot) bit_flights_.resize(slot + 1);
    bit_flights_[slot] = flight;
    ++counters_.cached;
  }
  if (!coordinator_) return send(0, submission);
  if (options_.trace) {
    for (const Flight& flight : flights) trace(Phase::rank_ready, flight->request.name, rank_);
  }
  coordinator_->take(0, std::move(submission), Clock::now());
}

void Negotiator::send(int to, const Message& message) {
  const Bytes bytes = encode(message);
  ++counters_.messages;
  counters_.message_bytes += bytes.size();
  transport_->send(to, bytes);
}

void Negotiator::lead() {
  while (auto decision = coordinator_->decide()) {
    const Bytes bytes = encode(*decision);
    for (int member = 1; member < size_; ++member) transport_->send(member, bytes);
    counters_.messages += static_cast<uint64_t>(size_ - 1);
    counters_.message_bytes += bytes.size() * static_cast<uint64_t>(size_ - 1);
    apply(std::move(*decision));
  }
  if (stop_.empty()) stop_ = inspector_.look(coordinator_->table(), Clock::now());
  if (!stop_.empty()) end(stop_, true);
}

void Negotiator::leave() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_ || !running_) return;
  }
  if (coordinator_) return end("negotiate: " + self() + " has shut down", true);
  const auto now = Clock::now();
  if (leave_by_ == Clock::time_point::max()) {
    leave_by_ =
        now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.leave_s));
    send(0, Leave{});
  } else if (now >= leave_by_) {
    raise(ErrorKind::comm, "negotiate: ", self(), " has shut down, and rank ", ranks_[0],
          " has not answered in ", options_.leave_s, " s");
  }
}

}  // namespace gossamer::negotiate
