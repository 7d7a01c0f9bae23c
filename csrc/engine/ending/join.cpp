// See join.h.
#include "engine/ending/join.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace gossamer {
namespace {

constexpr int64_t kCountBytes = sizeof(double);
constexpr double kNotCounted = std::numeric_limits<double>::quiet_NaN();
enum Presence : uint8_t { kAbsent, kPresent, kOver };  // over: this rank has input but has left the join

}  // namespace

void Join::start(bool mean_of_active, bool raise_early, std::function<bool()> on_begin) {
  worker_.check_alive();
  const std::lock_guard<std::mutex> lock(mutex_);
  settings_ = Settings{mean_of_active, raise_early, std::move(on_begin)};
  ended_early_.reset();
}

void Join::end() {
  std::optional<Settings> ended;  // may hold a Python object, which is freed without the mutex
  const std::lock_guard<std::mutex> lock(mutex_);
  ended.swap(settings_);
}

void Join::begin_backward() {
  if ((settings_ || counts_) && !roll_) call_roll(/*present=*/true);
}

// An active rank goes on with its backward meanwhile: the worker sends no bucket before the roll call is over.
void Join::call_roll(bool present) {
  if (ended_early_) throw std::runtime_error(*ended_early_);  // the other ranks have left
  const bool over = present && settings_ && settings_->on_begin && !settings_->on_begin();
  Communicator& control = worker_.control();
  const int64_t size = control.size(), rank = control.rank();
  // The ranks' bytes are reduced with MAX, and each rank writes to its own place.
  roll_ = at::zeros({size * (1 + kCountBytes)}, at::kByte);
  auto* bytes = roll_->data_ptr<uint8_t>();
  bytes[rank] = over ? kOver : present ? kPresent : kAbsent;
  const double samples = present ? samples_.value_or(kNotCounted) : 0.0;
  std::memcpy(bytes + size + rank * kCountBytes, &samples, kCountBytes);
  const auto call = [&control, roll = *roll_] {
    if (control.size() > 1) control.all_reduce(roll, ReduceOp::max)->wait();
  };
  worker_.executor().submit([this, call] { worker_.run_guarded("join", call); }, "roll call");
  // With the mutex, so that a thread of this backward for another device sends nothing meanwhile.
  if (present && settings_ && settings_->raise_early) finish_roll(/*raise_early=*/true);
}

// Waits for the roll call. With `raise_early`, throws if some ranks are absent and some are not.
void Join::finish_roll(bool raise_early) {
  worker_.wait();
  worker_.check_alive();  // it may have been closed meanwhile
  const auto missing = absent();
  if (!raise_early || missing.empty() || active() == 0) return;
  roll_.reset();
  std::ostringstream text;
  text << worker_.place() << ": no input is left on rank";
  for (const int rank : missing) text << (rank == missing.front() ? " " : ", ") << rank;
  text << "; join() was asked to raise then (throw_on_early_termination=True)";
  ended_early_ = text.str();
  throw std::runtime_error(*ended_early_);
}

bool Join::answer_roll() {
  bool raise_early = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    worker_.check_alive();
    if (!settings_) raise_python(ErrorKind::config, "join: this rank is in no join context");
    raise_early = settings_->raise_early;
    call_roll(/*present=*/false);
  }
  // Without the mutex: the roll call takes as long as the other ranks need, and Ctrl-C may close this engine.
  finish_roll(raise_early);
  if (active() > 0) return true;
  roll_.reset();
  return false;
}

void Join::settle() {
  if (!roll_) return;
  const auto* bytes = roll_->data_ptr<uint8_t>();
  if (std::count(bytes, bytes + worker_.control().size(), kOver) > 0) end();
}

void Join::end_backward() {
  roll_.reset();
  shadowing_ = false;
  samples_.reset();
}

void Join::count(double samples) {
  worker_.check_alive();
  const std::lock_guard<std::mutex> lock(mutex_);
  samples_ = samples;
  counts_ = true;
}

std::vector<double> Join::counted() const {
  const auto size = static_cast<size_t>(worker_.control().size());
  std::vector<double> samples(size);
  if (roll_) std::memcpy(samples.data(), roll_->data_ptr<uint8_t>() + size, size * sizeof(double));
  if (!roll_) std::fill(samples.begin(), samples.end(), kNotCounted);
  return samples;
}

double Join::weight() const {
  if (!roll_) return 1.0;
  const auto samples = counted();
  size_t without = 0;
  for (const double each : samples) without += std::isnan(each);
  if (without + absent().size() == samples.size()) return 1.0;  // nobody counts
  if (without > 0) {
    std::ostringstream text;
    for (size_t rank = 0; rank < samples.size(); ++rank) {
      text << (rank == 0 ? "" : ", ") << "rank " << rank << ": ";
      if (std::isnan(samples[rank])) text << "nothing";
      if (!std::isnan(samples[rank])) text << samples[rank];
    }
    raise_python(ErrorKind::config, worker_.place(),
                 ": count() must be called on every rank before each backward, or on none, got ", text.str());
  }
  const double mean =
      std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(samples.size());
  return mean > 0 ? samples[static_cast<size_t>(worker_.control().rank())] / mean : 0.0;
}

std::vector<int> Join::absent() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < worker_.control().size(); ++rank) {
    if (roll_->data_ptr<uint8_t>()[rank] == kAbsent) ranks.push_back(rank);
  }
  return ranks;
}

double Join::scale() const {
  if (everyone() || !settings_ || !settings_->mean_of_active) return 1.0;
  const auto samples = counted();
  if (std::none_of(samples.begin(), samples.end(), [](double each) { return std::isnan(each); })) return 1.0;
  return static_cast<double>(worker_.control().size()) / active();
}

}  // namespace gossamer
