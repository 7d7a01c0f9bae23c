// See work.h. The future is made at the first request: most callers only wait.
#include "backend/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <utility>

#include "errors.h"

namespace gossamer {

c10::intrusive_ptr<c10::ivalue::Future> new_future(const Outputs& outputs, std::vector<c10::Device> devices) {
  const auto list = c10::ListType::create(c10::TensorType::get());
  return c10::make_intrusive<c10::ivalue::Future>(outputs.size() > 1 ? c10::ListType::create(list) : list,
                                                  std::move(devices));
}

void complete(c10::ivalue::Future& future, const Outputs& outputs) {
  if (outputs.size() > 1) {
    future.markCompleted(c10::IValue(outputs));
  } else {
    future.markCompleted(c10::IValue(outputs.empty() ? std::vector<at::Tensor>() : outputs[0]));
  }
}

std::vector<at::Tensor> all_of(const Outputs& outputs) {
  std::vector<at::Tensor> all;
  for (const auto& list : outputs) all.insert(all.end(), list.begin(), list.end());
  return all;
}

GossamerWork::GossamerWork(int rank, c10d::OpType type, const char* title,
                           const std::vector<at::Tensor>& inputs, Outputs outputs, uint64_t sequence,
                           std::function<void(GossamerWork&)> help)
    : Work(rank, type, title, inputs),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      help_(std::move(help)) {}

bool GossamerWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!completed_ && timeout == kNoTimeout) {
    lock.unlock();
    if (help_) help_(*this);
    lock.lock();
    cv_.wait(lock, [this] { return completed_; });
  } else if (!completed_ && !cv_.wait_for(lock, timeout, [this] { return completed_; })) {
    raise_python(ErrorKind::comm, c10d::opTypeToString(opType_), ": not complete after ", timeout.count(),
                 " ms of waiting; the operation goes on");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

int GossamerWork::sourceRank() const {
  const bool receives = opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE;
  return receives ? source_ : Work::sourceRank();  // throws torch's own error
}

std::vector<at::Tensor> GossamerWork::result() { return all_of(outputs_); }

void GossamerWork::settle(std::exception_ptr error) {
  error ? future_->setError(std::move(error)) : gossamer::complete(*future_, outputs_);
}

c10::intrusive_ptr<c10::ivalue::Future> GossamerWork::getFuture() {
  const std::lock_guard<std::mutex> lock(future_mutex_);
  if (!future_) {
    future_ = new_future(outputs_);
    if (isCompleted()) settle(exception());
  }
  return future_;
}

std::function<void()> GossamerWork::complete(std::exception_ptr error, int source) {
  source_ = source;
  const std::lock_guard<std::mutex> lock(future_mutex_);
  finish(error);
  if (!future_) return nullptr;
  auto self = c10::intrusive_ptr<GossamerWork>::reclaim_copy(this);
  return [self = std::move(self), error = std::move(error)] { self->settle(error); };
}

void GossamerWork::abort() {
  if (on_abort_) on_abort_();
}

}  // namespace gossamer
