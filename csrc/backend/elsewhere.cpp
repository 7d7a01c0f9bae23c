// See elsewhere.h; and what GossamerBackend does for such tensors.
#include "backend/elsewhere.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "backend/backend.h"
#include "backend/gil.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr auto kGrace = std::chrono::seconds(5);

}  // namespace

c10d::Backend& Elsewhere::backend(at::Device device) {
  const WithoutGil without_gil;  // connect_ may want it, and another thread the mutex
  const std::lock_guard<std::mutex> lock(mutex_);
  if (shut_down_) raise_python(ErrorKind::comm, "the group was shut down; make a new one");
  if (!backend_) {
    backend_ = connect_(device);
    device_ = device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  return *backend_;
}

Elsewhere::BackendPtr Elsewhere::made() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return backend_;
}

void Elsewhere::shut_down(bool failed) {
  BackendPtr backend;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    shut_down_ = true;
    backend = std::exchange(backend_, nullptr);
  }
  if (!backend) return;
  std::packaged_task<void()> finish(
      [device = *device_] { c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index()); });
  auto end = finish.get_future();
  if (!failed) {
    finish();
    end.get();
    return backend->shutdown();
  }
  std::thread(std::move(finish)).detach();
  end.wait_for(kGrace);
  backend->abort();  // NCCL's own end waits for every rank
}

void Elsewhere::leak() { backend_.release(); }

bool Works::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}
bool Works::isSuccess() const { return !exception(); }
std::exception_ptr Works::exception() const {
  for (const auto& work : works_)
    if (auto error = work->exception()) return error;
  return nullptr;
}
void Works::synchronize() {
  for (const auto& work : works_) work->synchronize();
}
bool Works::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}
std::vector<at::Tensor> Works::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    const auto some = work->result();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

void GossamerBackend::connect_elsewhere(c10::DeviceType type, ConnectDevice connect) {
  connect_device_ = std::move(connect);
  elsewhere_.connect_by(type, [this](at::Device device) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>("device", own_store_);
    return connect_device_({store, getRank(), getSize(), options_->timeout}, device);
  });
}

c10d::Backend* GossamerBackend::elsewhere(const at::Tensor& x) {
  return elsewhere_.takes(x.device()) ? &backend_of(x.device()) : nullptr;
}

c10d::Backend& GossamerBackend::backend_of(at::Device device) {
  check_argument(elsewhere_.takes(device), "gossamer backend: this group has no connections for tensors on ",
                 device, "; make it with \"cpu:gossamer,", device.type(), ":gossamer\"");
  require_usable();
  c10d::Backend& backend = elsewhere_.backend(device);
  if (coalescing_ && !std::exchange(coalescing_->elsewhere, true)) backend.startCoalescing();
  return backend;
}

void GossamerBackend::eagerConnectSingleDevice(at::Device device) {
  if (elsewhere_.takes(device)) backend_of(device).eagerConnectSingleDevice(device);
}

void GossamerBackend::startCoalescing() {
  check_argument(!coalescing_,
                 "gossamer backend: operations are coalesced already; nested coalescing is unknown");
  coalescing_ = std::make_unique<Coalescing>();
}

GossamerBackend::Reply GossamerBackend::endCoalescing() {
  check_argument(coalescing_ != nullptr, "gossamer backend: endCoalescing() without startCoalescing()");
  const auto ended = std::exchange(coalescing_, nullptr);
  auto works = std::move(ended->works);
  if (ended->elsewhere)
    if (auto work = elsewhere_.made()->endCoalescing()) works.push_back(std::move(work));
  if (works.size() == 1) return works[0];
  return c10::make_intrusive<Works>(std::move(works));
}

}  // namespace gossamer
