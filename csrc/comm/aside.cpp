// See aside.h.
#include "comm/aside.h"

#include <c10/util/thread_name.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

namespace gossamer {
namespace aside {  // not anonymous, because AsideStore::Desk has members of these types

// The state of one process. Never freed: detached threads use it to the end.
struct Everyone {
  const pid_t owner = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  bool leaving = false;
};

std::atomic<Everyone*> everyone_here{nullptr};

// A forked child gets a state of its own, because a thread of the parent may hold the mutex of the old one for ever.
Everyone& everyone() {
  Everyone* known = everyone_here.load();
  while (!known || known->owner != getpid()) {
    auto made = std::make_unique<Everyone>();
    if (everyone_here.compare_exchange_strong(known, made.get())) return *made.release();
  }
  return *known;
}

struct Answer {
  bool come = false;
  std::string failure;
};

}  // namespace aside

struct AsideStore::Desk {
  explicit Desk(c10::intrusive_ptr<c10d::Store> origin) : store(std::move(origin)) {}

  // Carries out each request once, in order. Ends when the AsideStore is gone.
  void work() {
    c10::setThreadName("gossamer-store");
    std::unique_lock<std::mutex> lock(all.mutex);
    while (true) {
      all.changed.wait(lock, [&] { return closed || !requests.empty(); });
      if (requests.empty()) return;
      auto [request, answer] = std::move(requests.front());
      requests.pop_front();
      lock.unlock();
      std::string failure;
      try {
        if (!own) store = store->clone();
        own = true;
        request(*store);
      } catch (const std::exception& error) {
        failure = error.what();
        if (failure.empty()) failure = "it gave no reason";
      }
      request = nullptr;
      lock.lock();
      answer->failure = std::move(failure);
      answer->come = true;
      all.changed.notify_all();
    }
  }

  aside::Everyone& all = aside::everyone();
  c10::intrusive_ptr<c10d::Store> store;  // used by the thread alone
  bool own = false;
  bool closed = false;
  std::deque<std::pair<Request, std::shared_ptr<aside::Answer>>> requests;
};

AsideStore::AsideStore(c10::intrusive_ptr<c10d::Store> store)
    : desk_(std::make_shared<Desk>(std::move(store))) {
  std::thread([desk = desk_] { desk->work(); }).detach();
}

AsideStore::~AsideStore() {
  if (desk_->all.owner != getpid()) {  // a forked child lacks the thread, and must not touch its connection
    (void)desk_->store.release();
    return;
  }
  const std::lock_guard<std::mutex> lock(desk_->all.mutex);
  desk_->closed = true;
  desk_->all.changed.notify_all();
}

void AsideStore::ask(Request request) {
  aside::Everyone& all = desk_->all;
  if (all.owner != getpid())
    throw std::runtime_error("this connection belongs to the process that was forked");
  const auto answer = std::make_shared<aside::Answer>();
  std::unique_lock<std::mutex> lock(all.mutex);
  if (!all.leaving) desk_->requests.emplace_back(std::move(request), answer);
  all.changed.notify_all();
  all.changed.wait(lock, [&] { return answer->come || all.leaving; });
  if (!answer->come) throw std::runtime_error("this process ends");
  if (!answer->failure.empty()) throw std::runtime_error(answer->failure);
}

int64_t AsideStore::add(const std::string& key, int64_t value) {
  const auto result = std::make_shared<int64_t>(0);  // the asker may have left before it is set
  ask([=](c10d::Store& store) { *result = store.add(key, value); });
  return *result;
}

void AsideStore::set(const std::string& key, const std::string& value) {
  ask([=](c10d::Store& store) { store.set(key, std::vector<uint8_t>(value.begin(), value.end())); });
}

bool AsideStore::check(const std::vector<std::string>& keys) {
  const auto result = std::make_shared<bool>(false);
  ask([=](c10d::Store& store) { *result = store.check(keys); });
  return *result;
}

std::vector<std::string> AsideStore::get(const std::vector<std::string>& keys) {
  const auto result = std::make_shared<std::vector<std::string>>();
  ask([=](c10d::Store& store) {
    const auto add = [&](const std::vector<uint8_t>& value) {
      result->emplace_back(value.begin(), value.end());
    };
    if (keys.size() > 1 && store.hasExtendedApi()) {
      for (const auto& value : store.multiGet(keys)) add(value);
    } else {
      for (const std::string& key : keys) add(store.get(key));
    }
  });
  return *result;
}

void AsideStore::leave() {
  aside::Everyone& all = aside::everyone();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.leaving = true;
  all.changed.notify_all();
}

}  // namespace gossamer
