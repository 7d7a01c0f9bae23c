// See roll_call.h.
#include "backend/roll_call.h"

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "backend/announced.h"

namespace gossamer {
namespace {

constexpr auto kTimeout = std::chrono::milliseconds(500);  // a waiting rank looks several times in it
constexpr auto kPoll = std::chrono::milliseconds(20);
const std::string kAsked = "roll call";

std::string present(int rank) { return "here/" + std::to_string(rank); }

}  // namespace

RollCall::RollCall(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : store_(std::move(store)), rank_(rank), size_(size) {}

void RollCall::answer() { store_->set(present(rank_), std::vector<uint8_t>{1}); }

void RollCall::answer_if_asked() {
  if (store_->check({kAsked})) answer();
}

std::string RollCall::silent_ranks() {
  std::string silent;
  try {
    answer();
    store_->set(kAsked, std::vector<uint8_t>{1});
    const auto until = std::chrono::steady_clock::now() + kTimeout;
    do {
      if (store_->check({kFailed})) return "another rank has said why";
      silent.clear();
      for (int rank = 0; rank < size_; ++rank) {
        if (!store_->check({present(rank)}))
          silent += (silent.empty() ? "rank " : ", ") + std::to_string(rank);
      }
      std::this_thread::sleep_for(kPoll);
    } while (!silent.empty() && std::chrono::steady_clock::now() < until);
  } catch (const std::exception&) {
    return "the store does not answer either";
  }
  return silent.empty() ? "every rank answers" : "silent: " + silent;
}

}  // namespace gossamer
