// send, recv and recv from any source. The mailbox carries them inside one host. Where a group spans several hosts, Gloo
// carries them: a receive from any source could not wait for both. See backend.h.
#include <functional>
#include <memory>
#include <thread>

#include "backend/checks.h"
#include "backend/gil.h"
#include "backend/start.h"

namespace gossamer {
namespace {

struct Posted {
  WorkPtr work;
  Flat flat;
};

void call_back(std::function<void()> callbacks) {
  const WhilePythonLives python;
  if (!python) return leak(callbacks);
  callbacks();
  callbacks = nullptr;
}

}  // namespace

shm::Mailbox& GossamerBackend::mailbox() {
  const std::lock_guard<std::mutex> lock(mailbox_mutex_);
  if (shut_down_) raise_python(ErrorKind::comm, "the group was shut down; make a new one");
  if (!mailbox_) mailbox_ = std::make_unique<shm::Mailbox>(*group_);
  return *mailbox_;
}

GossamerBackend::Reply GossamerBackend::post(Tensors& tensors, int peer, int tag, c10d::OpType type) {
  const bool sends = type == c10d::OpType::SEND;
  const bool any = type == c10d::OpType::RECVANYSOURCE;
  const char* title = sends ? "gossamer:send" : "gossamer:recv";
  if (tensors.size() != 1 || !tensors[0].is_cpu() || tensors[0].layout() != at::kStrided || tag < 0 ||
      (!any && (peer < 0 || peer >= getSize()))) {
    raise_python(ErrorKind::config, title, ": one dense CPU tensor, a rank in [0, ", getSize(),
                 ") and a tag >= 0, got ", tensors.size(), " tensors, rank ", peer, ", tag ", tag);
  }
  auto work = c10::make_intrusive<GossamerWork>(getRank(), type, title, tensors, Lists{tensors},
                                                sequence_.load(), nullptr);
  work->on_abort(aborter());
  if (!sends) require_disjoint(title, tensors[0]);
  auto posted = std::make_shared<Posted>(Posted{work, Flat(tensors[0])});
  void* data = posted->flat.data();
  const int64_t bytes = posted->flat.bytes();
  auto done = [posted = std::move(posted), sends, title](int source, std::exception_ptr error) mutable {
    try {
      if (!sends && !error) posted->flat.write_back();
    } catch (...) {
      error = std::current_exception();
    }
    auto callbacks = posted->work->complete(error ? python_error(title, error) : nullptr, source);
    // Callbacks may wait for other messages, or drop the mailbox, so they do not run in its thread.
    if (callbacks) std::thread(call_back, std::move(callbacks)).detach();
    const WhilePythonLives python;
    if (!python) leak(posted);
    posted = nullptr;  // freed here, not where the mailbox drops this function
  };
  const auto deadline = deadline_of(c10d::kUnsetTimeout);
  try {
    if (sends) {
      mailbox().send(peer, static_cast<uint64_t>(tag), data, bytes, deadline, std::move(done));
    } else {
      mailbox().receive(any ? -1 : peer, static_cast<uint64_t>(tag), data, bytes, deadline, std::move(done));
    }
  } catch (...) {
    std::rethrow_exception(python_error(title, std::current_exception()));
  }
  return work;
}

GossamerBackend::Reply GossamerBackend::send(Tensors& tensors, int to, int tag) {
  if (auto* other = elsewhere(tensors)) return other->send(tensors, to, tag);
  require_usable();
  return begun(hosts_ ? gloo()->send(tensors, to, tag) : post(tensors, to, tag, c10d::OpType::SEND));
}

GossamerBackend::Reply GossamerBackend::recv(Tensors& tensors, int from, int tag) {
  if (auto* other = elsewhere(tensors)) return other->recv(tensors, from, tag);
  require_usable();
  return begun(hosts_ ? gloo()->recv(tensors, from, tag) : post(tensors, from, tag, c10d::OpType::RECV));
}

GossamerBackend::Reply GossamerBackend::recvAnysource(Tensors& tensors, int tag) {
  if (auto* other = elsewhere(tensors)) return other->recvAnysource(tensors, tag);
  require_usable();
  return begun(hosts_ ? gloo()->recvAnysource(tensors, tag)
                      : post(tensors, -1, tag, c10d::OpType::RECVANYSOURCE));
}

}  // namespace gossamer
