// The end of a backward that all ranks share. They agree on errors, on the number of optimizer steps, and on which
// parameters have a gradient on any rank, with one small all-reduce after the last bucket. The default.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/ending/ending.h"

namespace gossamer {

struct Agreement;
class Vote;

class Lockstep : public Ending {
 public:
  // `on_late` is called, without the GIL, when some rank has trainable parameters outside the plan; it must call
  // append_bucket() in the same way on every rank. `on_order` is called once, at the end of the first synchronised
  // backward, with rank 0's order of arrival: the same on every rank, at the same place in the sequence of collectives.
  Lockstep(const Parts& parts, std::function<void()> on_late,
           std::function<void(std::vector<int64_t>)> on_order);

  // Called, without the GIL, at the end of each backward that succeeded on every rank. The call is at the same place in the
  // sequence of collectives on all ranks, so it may change the plan and communicate. Null: nothing is called.
  void set_on_end(std::function<void()> on_end) { on_end_ = std::move(on_end); }
  bool on_end() const { return on_end_ != nullptr; }

  // Called, without the GIL, when a backward cannot end because its group fails. `counted`: its gradients are the mean
  // already, and it has been counted. If the function returns true, the backward has been ended by other means.
  void set_on_lost(std::function<bool(bool counted, const std::string& why)> on_lost) {
    on_lost_ = std::move(on_lost);
  }

  // Any rank may wish for something that all ranks then do together; the end of a backward tells all of them.
  void set_wish(bool wish) { wish_ = wish; }
  bool wish() const { return wish_; }
  bool wished() const { return wished_; }  // whether a rank did, as of the last backward that ended

  // The ranks compare this number at the end of each backward.
  void set_optimizer_steps(int64_t steps) { optimizer_steps_ = steps; }
  int64_t optimizer_steps() const { return optimizer_steps_; }

  // A backward, with this number of autograd's, goes through the model, whose parameters are all frozen. It is none of this
  // model's and sends nothing. Their number is compared too, because the ranks must agree which backwards these are.
  void count_frozen(int graph_task);  // with the mutex
  void forget_frozen() { frozen_ = 0; }

  bool order_shared() const { return order_shared_; }
  void set_order_shared(bool shared) { order_shared_ = shared; }

  void before_last_bucket() override;
  void after_last_bucket() override;
  void end(bool abandoned) override { end(abandoned, /*trained_too=*/false); }

  // `trained_too`: every trained parameter takes the reduced gradient, even if no rank has one.
  void end(bool abandoned, bool trained_too);
  void reset();  // with the mutex

 private:
  void end_in_group(bool abandoned, bool trained_too);
  Agreement complete();
  void make_vote(const std::vector<bool>& used);
  void submit_vote();
  void adopt(const Bucket& bucket, const std::vector<bool>& used, bool trained_too);
  void scale_to_active();
  void raise_disagreement(const Agreement& agreement, bool abandoned);
  void share_order();

  std::function<void()> on_late_;
  std::function<void(std::vector<int64_t>)> on_order_;
  std::function<void()> on_end_;
  std::function<bool(bool, const std::string&)> on_lost_;
  bool counted_ = false;  // this backward
  bool disagreed_ = false;
  std::atomic<bool> wish_{false};
  std::atomic<bool> wished_{false};
  std::shared_ptr<Vote> vote_;
  std::optional<std::vector<bool>> used_;  // while everything is sent
  std::atomic<int64_t> optimizer_steps_{0};
  std::atomic<int64_t> frozen_{0};  // backwards, by count_frozen()
  int last_frozen_ = -1;            // autograd's number of the last one
  bool order_shared_ = false;
};

}  // namespace gossamer
