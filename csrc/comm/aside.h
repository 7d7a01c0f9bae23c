// A store whose requests run on a thread of its own, which never needs the interpreter. A Python thread that returns from
// native code while the interpreter ends takes the process down, and the process that hosts a store may be stopped for any
// time. So a thread that waits here can be told to leave. Used by the stall watch.
#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace gossamer {

// All methods block without the GIL until the store has answered. They throw std::runtime_error with the store's reason,
// or after leave(). Any thread may call them.
class AsideStore {
 public:
  // Sends requests through a clone of `store`, made at the first one: a wait blocks everyone on the same connection.
  explicit AsideStore(c10::intrusive_ptr<c10d::Store> store);
  AsideStore(const AsideStore&) = delete;
  AsideStore& operator=(const AsideStore&) = delete;
  ~AsideStore();

  int64_t add(const std::string& key, int64_t value);
  void set(const std::string& key, const std::string& value);
  bool check(const std::vector<std::string>& keys);
  std::vector<std::string> get(const std::vector<std::string>& keys);

  // Ends the waits in all stores of this class; later requests throw.
  static void leave();

 private:
  struct Desk;
  using Request = std::function<void(c10d::Store&)>;

  void ask(Request request);

  std::shared_ptr<Desk> desk_;
};

}  // namespace gossamer
