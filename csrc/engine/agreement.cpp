// See agreement.h. Bytes are reduced with MAX, so "any rank" is one comparison.
#include "engine/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

namespace gossamer {
namespace {

enum Presence : uint8_t { kAbsent, kPresent, kOver };

// MAX over (steps mod m) and over (m - 1 - steps mod m) adds up to m - 1 only if all ranks sent the same.
constexpr int64_t kStepModulus = 251;
enum Field : int64_t { kStep, kStepComplement, kFailed, kLate, kLeftOut, kUsed };
constexpr int64_t kTextBytes = 1000;

}  // namespace

AgreementRound::AgreementRound(Communicator& control, std::optional<int64_t> steps, bool failed, bool late,
                               bool left_out, const std::vector<bool>& used)
    : control_(control), message_(at::zeros({kUsed + static_cast<int64_t>(used.size())}, at::kByte)) {
  auto* bytes = message_.data_ptr<uint8_t>();
  if (steps) {  // otherwise zeros, which no maximum shows
    bytes[kStep] = static_cast<uint8_t>(*steps % kStepModulus);
    bytes[kStepComplement] = static_cast<uint8_t>(kStepModulus - 1 - *steps % kStepModulus);
  }
  bytes[kFailed] = failed;
  bytes[kLate] = late;
  bytes[kLeftOut] = left_out;
  for (size_t i = 0; i < used.size(); ++i) bytes[kUsed + i] = used[i];
}

void AgreementRound::start() {
  if (control_.size() > 1) pending_ = control_.all_reduce(message_, ReduceOp::max);
}

Agreement AgreementRound::wait() {
  if (pending_) pending_->wait();
  const auto* bytes = message_.data_ptr<uint8_t>();
  Agreement result;
  result.same_steps = bytes[kStep] + bytes[kStepComplement] == kStepModulus - 1;
  result.failed = bytes[kFailed] != 0;
  result.late = bytes[kLate] != 0;
  result.left_out = bytes[kLeftOut] != 0;
  const int64_t count = message_.numel() - kUsed;
  for (int64_t i = 0; i < count; ++i) result.used.push_back(bytes[kUsed + i] != 0);
  return result;
}

RollCall::RollCall(Communicator& control, bool present, bool over)
    : control_(control), message_(at::zeros({control.size()}, at::kByte)) {
  message_.data_ptr<uint8_t>()[control.rank()] = over ? kOver : present ? kPresent : kAbsent;
}

void RollCall::run() {
  if (control_.size() > 1) control_.all_reduce(message_, ReduceOp::max)->wait();
}

std::vector<int> RollCall::absent() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < control_.size(); ++rank) {
    if (message_.data_ptr<uint8_t>()[rank] == kAbsent) ranks.push_back(rank);
  }
  return ranks;
}

bool RollCall::over() const {
  const auto* bytes = message_.data_ptr<uint8_t>();
  return std::count(bytes, bytes + message_.numel(), kOver) > 0;
}

int RollCall::active() const { return control_.size() - static_cast<int>(absent().size()); }

std::vector<std::string> gather_texts(Communicator& control, const std::string& text) {
  const auto mine = at::zeros({kTextBytes}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), std::min<size_t>(text.size(), kTextBytes - 1));
  auto all = at::empty({control.size() * kTextBytes}, at::kByte);
  if (control.size() > 1) {
    control.all_gather(all, mine)->wait();
  } else {
    all = mine;
  }
  std::vector<std::string> texts;
  for (int rank = 0; rank < control.size(); ++rank) {
    texts.emplace_back(reinterpret_cast<const char*>(all.data_ptr<uint8_t>() + rank * kTextBytes));
  }
  return texts;
}

}  // namespace gossamer
