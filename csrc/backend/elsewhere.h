// The tensors of a group that are on an accelerator: another backend, NCCL, takes them as they are. Used by backend.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace gossamer {

class Elsewhere {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Connect = std::function<BackendPtr(at::Device device)>;

  // From now on tensors of this device type go to the backend that `connect` makes when the first of them comes. To be
  // called before any operation.
  void connect_by(c10::DeviceType type, Connect connect) {
    type_ = type;
    connect_ = std::move(connect);
  }
  bool takes(at::Device device) const { return type_ && device.type() == *type_; }
  std::optional<c10::DeviceType> type() const { return type_; }

  c10d::Backend& backend(at::Device device);
  BackendPtr made();  // null if no such tensor has come
  // Lets what is in flight finish. If the group has `failed`, it may never do so, and gets some seconds. Nothing can be made
  // afterwards.
  void shut_down(bool failed);
  void leak();  // in a forked child, which has none of its threads
  void drop() { backend_.reset(); }

 private:
  std::optional<c10::DeviceType> type_;
  Connect connect_;
  std::mutex mutex_;
  BackendPtr backend_;
  std::optional<at::Device> device_;  // of the first tensor
  bool shut_down_ = false;
};

// Several works as one: what endCoalescing() returns. The future holds nothing.
class Works : public c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  explicit Works(std::vector<WorkPtr> works) : works_(std::move(works)) {}
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;

 private:
  std::vector<WorkPtr> works_;
};

}  // namespace gossamer
