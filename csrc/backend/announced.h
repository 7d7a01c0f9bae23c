// What a rank that fails tells the others, under a key of their group's store. The first reason stays.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

namespace gossamer {

// Empty if none has told anything. Throws if the store does not answer.
inline std::string announced(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return {};
  const auto text = store.get(key);
  return {text.begin(), text.end()};
}

inline void announce(c10d::Store& store, const std::string& key, const std::string& text) {
  if (announced(store, key).empty()) store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

// The key in the store of a group over several hosts.
inline const std::string kFailed = "failed";

}  // namespace gossamer
