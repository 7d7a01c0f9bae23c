// A store whose requests are carried out by a thread of its own that never needs the interpreter. A Python thread that
// comes back from native code into an interpreter that ends takes the process down, and whoever hosts a store may be
// stopped for as long as it likes: so who waits here can be told to leave. Used by the stall watch.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/types.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace gossamer {

// All methods block without the GIL until the store has answered, and throw std::runtime_error with the store's reason,
// or because of leave(). Any thread may call them.
class AsideStore {
 public:
  // Asks a clone of it, made at the first request: who waits in a store holds up all others with the same connection.
  explicit AsideStore(c10::intrusive_ptr<c10d::Store> store);
  AsideStore(const AsideStore&) = delete;
  AsideStore& operator=(const AsideStore&) = delete;
  ~AsideStore();

  int64_t add(const std::string& key, int64_t value);
  void set(const std::string& key, const std::string& value);
  bool check(const std::vector<std::string>& keys);
  std::vector<std::string> get(const std::vector<std::string>& keys);

  // Whoever waits in any store of this kind leaves it now, and nobody waits again.
  static void leave();

 private:
  struct Desk;
  using Request = std::function<void(c10d::Store&)>;

  void ask(Request request);

  std::shared_ptr<Desk> desk_;
};

void bind_aside(pybind11::module_& module);

}  // namespace gossamer
