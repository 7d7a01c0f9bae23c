// Readiness. Hooks on autograd's gradient accumulators count and check the gradients of one model as they come, in C++, so
// that a backward never waits for the GIL here. Hooks know the place of a parameter in the plan, but not when a bucket is
// sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/bucket.h"
#include "errors.h"

namespace gossamer {

// Whether the calling thread is in a backward, for example in a recomputed forward.
bool inside_backward();
// Whether that backward adds to param.grad. torch.autograd.grad does not.
bool inside_backward_of_all();

class Hooks {
 public:
  // `params` are all parameters of the model, trainable or not, the same on every rank. `mutex` is the engine's.
  Hooks(std::vector<at::Tensor> params, std::vector<std::string> names, std::mutex& mutex);

  // --- from Python, between backwards ---

  // In a static graph each parameter gets its gradient equally often in every backward, and is complete with the last one.
  // The first synchronised backward counts, and sends everything at its end. Call this before that backward.
  void set_static_graph() { static_graph_ = true; }

  // The planned parameters that got no gradient in any synchronised backward since begin_forward() (in a static graph:
  // fewer than in the first), as of the end of the last one; and whether any rank has such parameters.
  void begin_forward();
  const std::vector<int64_t>& left_out() const { return left_out_; }
  bool left_out_somewhere() const { return left_out_somewhere_; }

  // Throws if a parameter was converted or moved since it was planned, because its hook is gone then. Returns the
  // trainable parameters outside the plan; if there are any, this rank is late(), and the next agreement tells the others.
  std::vector<int64_t> survey();
  bool late() const { return late_; }
  void set_late(bool late) { late_ = late; }

  // The name of a planned parameter whose hook was made on the default stream, which no CUDA graph can hold.
  std::optional<std::string> on_default_stream() const;

  // --- with the mutex ---

  using Listener = std::function<void(int64_t index, bool arrived)>;  // called without the mutex
  void adopt(const std::shared_ptr<Bucket>& bucket, size_t number, const Listener& listener);
  void forget_plan();
  void remove();
  void reset();                                        // after a backward, or when the plan changes
  std::vector<int64_t> survey_locked();                // as survey()
  void expect(int64_t passes);                         // gradients until a parameter is complete, from now on
  std::vector<int64_t> awaited(size_t buckets) const;  // how many parameters of each bucket

  // Counts the gradient that has just come, or the message that none will come.
  enum class Arrival { none, complete, surplus };
  void begin_backward() { order_.clear(); }
  Arrival arrive(int64_t index, bool arrived);
  std::pair<size_t, size_t> position(int64_t index) const;  // which bucket, and where within
  void refuse_surplus(int64_t index);                       // as this step's failure
  const std::string& name(int64_t index) const { return names_[static_cast<size_t>(index)]; }
  bool any_trainable() const;  // of all parameters of the model
  bool any_complete() const;
  void drop_gradients();  // of the plan

  // Which parameters have a gradient: those that just got one, and those that got none but kept an earlier one.
  std::vector<bool> used() const;
  std::vector<int64_t> unreached() const;  // what left_out() will be
  bool has_gradient(
      int64_t index) const;  // complete in this backward, and with a gradient: autograd may bring none
  std::vector<int64_t> incomplete() const;  // parameters of the plan for which that does not hold
  // Keeps what this backward has brought, before the plan grows and forgets it. `counts`: its arrivals can count as the
  // model's.
  void take_stock(bool counts, std::optional<bool> left_out_somewhere);
  const std::vector<int64_t>& order() const { return order_; }  // of completion, in this backward

  // The first reason why this rank's part of this backward is useless.
  void remember_failure(ErrorKind kind, const std::string& text);
  const std::optional<std::pair<ErrorKind, std::string>>& failure() const { return failure_; }

 private:
  struct Slot {                      // where a parameter lives in the plan, and its hook
    std::shared_ptr<Bucket> bucket;  // null: outside the plan
    size_t number = 0;               // of the bucket
    size_t position = 0;             // within it
    bool ready = false;
    bool has_gradient = false;          // valid if ready: autograd may bring none
    bool reached = false;               // ready in some backward since begin_forward()
    int64_t arrivals = 0;               // in this backward
    int64_t expected = 1;               // arrivals that make it ready; a static graph may have others
    std::shared_ptr<void> accumulator;  // keeps the AccumulateGrad node, and so the hook, alive
    const void* node = nullptr;         // that node
    const void* hook = nullptr;         // on it
    std::function<void()> remove_hook;
  };
  void add_hook(int64_t index, const Listener& listener);
  void check_gradient(int64_t index);
  void require_own(int64_t index) const;
  bool counting() const { return static_graph_ && !counted_; }

  std::vector<at::Tensor> params_;
  std::vector<std::string> names_;
  std::mutex& mutex_;
  std::vector<Slot> slots_;
  std::vector<int64_t> order_;
  std::optional<std::pair<ErrorKind, std::string>> failure_;
  std::optional<int64_t> passes_;  // of every parameter, where expect() has been called
  std::atomic<bool> late_{false};
  bool static_graph_ = false;
  bool counted_ = false;  // the first backward has been counted
  std::vector<int64_t> left_out_;
  bool left_out_somewhere_ = false;
};

}  // namespace gossamer
