// See across.h.
#include "backend/across.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "backend/announced.h"
#include "codec/codec.h"

namespace gossamer {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr auto kForReasons = std::chrono::milliseconds(500), kPoll = std::chrono::milliseconds(20);
// A look ends a wait that is too long, unless the store is gone.
constexpr auto kAfterLooks = std::chrono::milliseconds(2000);

std::string key_of_host(int host) { return "call/" + std::to_string(host); }

// A tag of Gloo's, which must not be negative.
int tag_of(uint64_t number, int64_t count, int64_t what, int64_t how) {
  const auto word = [](int64_t x) { return static_cast<uint64_t>(x); };
  return static_cast<int>(codec::make_key(number, word(count), word(what), word(how)) & 0x7fffffff);
}

}  // namespace

struct CallAcross::Facts {
  // What a rank that waits has written under its host's key. Before that, the key holds less.
  struct Record {
    uint64_t number;
    int32_t rank;  // the first one of the host
    shm::Call call;
  };

  c10::intrusive_ptr<c10d::Store> store;
  RollCall roll_call;
  int hosts, host;
  Record own;
  shm::Deadline deadline;
  bool written = false;

  std::string key_of_error() const { return "differ/" + std::to_string(own.number); }

  std::string differ(const std::string& text) const {
    const auto first = store->compareSet(key_of_error(), {}, Bytes(text.begin(), text.end()));
    return {first.begin(), first.end()};
  }

  std::vector<Bytes> records() const {
    std::vector<std::string> keys;
    for (int other = 0; other < hosts; ++other) keys.push_back(key_of_host(other));
    if (!store->check(keys)) return {};  // a host has not made its part of the group yet
    if (store->hasExtendedApi()) return store->multiGet(keys);
    std::vector<Bytes> values;
    for (const auto& key : keys) values.push_back(store->get(key));
    return values;
  }

  void compare() {
    if (store->check({key_of_error()})) throw CallsDiffer(differ({}));
    if (!std::exchange(written, true)) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(&own);
      store->set(key_of_host(host), Bytes(bytes, bytes + sizeof(own)));
    }
    for (const Bytes& value : records()) {
      Record other;
      if (value.size() != sizeof(other)) continue;
      std::memcpy(&other, value.data(), sizeof(other));
      if (other.number != own.number || shm::alike(other.call, own.call)) continue;
      const auto& [one, two] =
          std::minmax(own, other, [](const Record& a, const Record& b) { return a.rank < b.rank; });
      throw CallsDiffer(differ(shm::describe_difference(one.call, one.rank, two.call, two.rank)));
    }
  }

  // What another rank says of a failure, which its host may know better. Waits for it a moment. Empty if none does.
  std::string told() const {
    try {
      const auto until = shm::Clock::now() + kForReasons;
      do {
        if (auto text = announced(*store, kFailed); !text.empty()) return text;
        std::this_thread::sleep_for(kPoll);
      } while (shm::Clock::now() < until);
    } catch (const std::exception&) {
      // The process that hosts the store is gone.
    }
    return {};
  }

  void look() {
    if (store->check({kFailed})) throw std::runtime_error("another rank has failed");
    roll_call.answer_if_asked();
    compare();
    if (shm::Clock::now() > deadline) throw std::runtime_error("Timed out");
  }
};

void CallAcross::prepare(const Place& place) {
  if (place.local.rank() == 0) place.store->set(key_of_host(place.local.host()), Bytes{0});
}

CallAcross::CallAcross(Place& place, uint64_t number, const shm::Call& call, shm::Deadline deadline)
    : place_(&place) {
  const auto& hosts = place.local.hosts();
  const int host = place.local.host();
  const Facts::Record own{number, hosts[static_cast<size_t>(host)][0], call};
  facts_ = std::make_shared<Facts>(
      Facts{place.store, place.roll_call, static_cast<int>(hosts.size()), host, own, deadline});
}

int CallAcross::tag() const {
  const shm::Call& call = facts_->own.call;
  const auto pair = [](int32_t high, int32_t low) {
    return (int64_t{high} << 32) | static_cast<uint32_t>(low);
  };
  return tag_of(facts_->own.number, call.count, pair(static_cast<int32_t>(call.kind), call.type),
                pair(call.op, call.root));
}

int CallAcross::tag_of_number() const { return tag_of(facts_->own.number, -1, -1, -1); }

void CallAcross::wait(c10d::Work& work, const Look& also) {
  const Look look = [facts = facts_, also] {
    facts->look();
    if (also) also();
  };
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(facts_->deadline - shm::Clock::now());
  try {
    place_->lookout.wait(work, look, std::max(left, std::chrono::milliseconds(0)) + kAfterLooks);
  } catch (const CallsDiffer&) {
    place_->local.mark_different(facts_->own.number);
    throw;
  } catch (const std::exception&) {
    if (const auto reason = facts_->told(); !reason.empty()) throw KnownFailure(reason);
    throw;
  }
}

std::string CallAcross::differ(const std::string& text) { return facts_->differ(text); }

void CallAcross::end() {
  for (int peer = 0; peer < place_->local.size(); ++peer)
    if (place_->local.found_different(peer) == facts_->own.number) throw CallsDiffer(facts_->differ({}));
}

}  // namespace gossamer
