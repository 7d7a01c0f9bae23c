// See owners.h.
#include "engine/owners.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "errors.h"

namespace gossamer {
namespace {

struct Owner {
  const Engine* engine = nullptr;
  std::weak_ptr<Engine> alive;
};

struct Owners {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Owner> by_param;
};

// Never destroyed: engines may end after the static objects.
Owners& owners() {
  static auto* const all = new Owners;
  return *all;
}

}  // namespace

void claim(const at::Tensor& param, const std::string& name, const std::shared_ptr<Engine>& engine) {
  Owners& all = owners();
  const std::lock_guard<std::mutex> lock(all.mutex);
  Owner& owner = all.by_param[param.unsafeGetTensorImpl()];
  const auto other =
      owner.alive.lock();  // null too while the owner is being destroyed: its hooks do nothing then
  check_argument(!other || other == engine, "engine: parameter '", name,
                 "' belongs to another wrapped model, which trains it; close() that wrapper first");
  owner = {engine.get(), engine};
}

void release(const Engine& engine) {
  Owners& all = owners();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto each = all.by_param.begin(); each != all.by_param.end();)
    each = each->second.engine == &engine ? all.by_param.erase(each) : std::next(each);
}

std::vector<std::shared_ptr<Engine>> owners_of(const std::vector<at::Tensor>& params) {
  std::vector<std::shared_ptr<Engine>> found;
  Owners& all = owners();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& param : params) {
    const auto owner = all.by_param.find(param.unsafeGetTensorImpl());
    if (owner == all.by_param.end()) continue;
    auto engine = owner->second.alive.lock();  // null while it is being destroyed
    if (engine && std::find(found.begin(), found.end(), engine) == found.end())
      found.push_back(std::move(engine));
  }
  return found;
}

}  // namespace gossamer
