// The engine of one model: counts gradients as autograd produces them, fires buckets in plan order onto the
// executor, and at the end of backward waits, agrees with the other ranks and hands the gradients over.
// It decides when; a BucketWork decides what. Python's gossamer.engine plans the buckets.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/agreement.h"
#include "engine/bucket.h"
#include "engine/executor.h"
#include "engine/work.h"
#include "errors.h"

namespace gossamer {

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `params` are all parameters of the model, trainable or not, the same on every rank; `control` is a CPU
  // group of the same ranks (the same object where `comm` is one). `on_late` is called, without the GIL, when
  // some rank has trainable parameters outside the plan; it must append_bucket() the same on every rank.
  // `on_order` is called once, at the end of the first synchronised backward, with rank 0's order of arrival: the
  // same on every rank, at the same place in the sequence of collectives.
  Engine(CommunicatorPtr comm, CommunicatorPtr control, std::vector<at::Tensor> params,
         std::vector<std::string> names, std::function<void()> on_late,
         std::function<void(std::vector<int64_t>)> on_order);
  ~Engine();

  // Between backwards, or in on_late and on_order. Gradients that exist move into the new bucket's memory, if it
  // has a field for them. `work` is what is done with the bucket when its gradients are complete.
  void clear_buckets();
  void append_bucket(const std::shared_ptr<Bucket>& bucket, std::shared_ptr<BucketWork> work);

  // Queues a task for the worker, after everything before it, on the side stream behind the caller's stream. All
  // ranks submit the same. Its exception, with `what` and the step in its text, comes out of the next wait(), or of
  // the backward that ends next.
  void submit(std::function<void()> task, const std::string& what);
  void wait();  // for everything submitted; what follows on the current stream comes after it

  // In lockstep (the default) every synchronised backward ends with the ranks' agreement. Otherwise nothing is sent at
  // its end, errors are this rank's alone, and the plan is fixed.
  void set_lockstep(bool lockstep) { lockstep_ = lockstep; }

  // Called, without the GIL, at the end of each synchronised backward in lockstep that succeeded on every rank: on all
  // of them at the same place in the sequence of collectives, so it may change the plan, and communicate. Null: nothing.
  void set_on_end(std::function<void()> on_end) { on_end_ = std::move(on_end); }

  // A parameter may get its gradient as often in one backward as it did in the first, and is complete with the last. The
  // first synchronised backward, which counts, sends everything at its end. Before that backward.
  void set_static_graph() { static_graph_ = true; }

  // Parameters of the plan that no synchronised backward since begin_forward() has brought a gradient for (in a static
  // graph: as many as in the first), as of the end of the last one, and whether any rank has such.
  void begin_forward();
  const std::vector<int64_t>& left_out() const { return left_out_; }
  bool left_out_somewhere() const { return left_out_somewhere_; }

  void set_sync(bool sync) { sync_ = sync; }
  bool sync() const { return sync_; }

  // Called when the model's output gets its gradient, which is before any parameter does and in the outermost
  // backward. torch.autograd.grad, which leaves param.grad alone, is none of this engine's business.
  void output_gradient();

  bool inside_backward() const;  // the calling thread is in a backward, such as a recomputed forward

  // If the last backward raised before its end, completes its communication so that no rank waits for this one.
  void abandon();

  // Before a forward: throws if a parameter was converted or moved since it was planned (its hook is gone then).
  // Returns the trainable parameters outside the plan; if there are any, the next backward's agreement says so.
  std::vector<int64_t> survey();

  // The ranks compare this number at the end of each synchronised backward.
  void set_optimizer_steps(int64_t steps) { optimizer_steps_ = steps; }
  int64_t optimizer_steps() const { return optimizer_steps_; }

  // Goes on where another engine was after so many synchronised backwards and optimizer steps, in the plan it has now.
  void resume(int64_t step, int64_t optimizer_steps);

  // Uneven inputs (join.cpp), between backwards, the same on every rank: from now on each synchronised backward begins
  // with a roll call. `mean_of_active`: averages are over the ranks that have input; over all otherwise. `raise_early`: the
  // backward raises where a rank has none. `on_begin`, if any, is called before each roll call but those of shadow();
  // where it returns false on any rank, the join ends on all with that backward.
  void start_join(bool mean_of_active, bool raise_early, std::function<bool()> on_begin);
  void end_join();

  // For a rank without input: takes part in one synchronised backward of the others, with zeros; gradients of before
  // are dropped. False, and nothing was sent, if no rank has input.
  bool shadow();
  bool ended_early() const {
    return ended_early_.has_value();
  }  // this join has raised on all ranks, as it was asked to

  // Ends this engine for an error that it has no part in. `announce`: lets the other ranks know, who have not had it.
  void give_up(const std::string& why, bool announce);

  // From any thread (waiting.cpp): what is known of a wait that lasts too long, which the error that ends it says too; empty
  // if none does any more. `stop`: ends the wait, of the others for this rank as well, and this engine.
  void tell_stall(const std::string& facts, bool stop);

  // Rounds (rounds.cpp), for a face that sees no forward: the end of a backward means nothing, and several may bring
  // gradients. A parameter is complete with its gradient number `passes`; one more before end_round() throws an
  // AssertionError out of that backward. end_round() sends what is left, and waits. Between rounds; again, at any time,
  // to count `passes` from now on for what is not complete.
  void use_rounds(int64_t passes);
  void end_round();
  bool round_is_under_way() const;  // some parameter of this round is complete

  // From the next backward on, keeps a copy of each bucket's gradients as they are before they are sent: what a codec does
  // to them cannot be told from what comes back. By bucket; false: forgets them.
  void keep_gradients(bool keep);
  std::map<int64_t, at::Tensor> kept_gradients() const;

  // What its worker does and how long it took; the same object as long as the engine lives.
  std::shared_ptr<observe::Recorder> recorder() const { return executor_->shared_recorder(); }

  int64_t step() const { return step_; }  // synchronised backwards that have ended
  void check_alive() const;               // throws the error that ended this engine, if one did

  // Why a CUDA graph cannot hold a step of this engine as it is now; empty if it can. Then a captured backward queues the
  // same as any other; what its end tells the host, the ranks' agreement among it, happens once, at capture (capture.cpp).
  std::string capture_refusal() const;
  void check_capture() const;  // throws that, where the current stream captures
  void close();                // idempotent

 private:
  struct Slot {  // where a parameter lives in the plan, and its hook
    int64_t bucket = -1;
    size_t position = 0;  // within the bucket
    bool ready = false;
    bool has_gradient = false;          // meaningful where ready: autograd may bring none
    bool reached = false;               // ready in some backward since begin_forward()
    int64_t arrivals = 0;               // in this backward
    int64_t expected = 1;               // arrivals that make it ready; a static graph may have others
    std::shared_ptr<void> accumulator;  // keeps the AccumulateGrad node, and so the hook, alive
    const void* node = nullptr;         // that node
    std::function<void()> remove_hook;
  };
  using Events = std::vector<std::pair<c10::Stream, c10::Event>>;
  struct Progress {  // of one bucket, in this backward
    int64_t pending = 0;
    Events events;
  };

  // Inside a backward: makes finish() run at its end. Idempotent.
  void begin_backward();
  void add_hook(int64_t index);
  void on_gradient(int64_t index, bool arrived);
  bool awaits_more(int64_t index);     // in a static graph
  bool check_gradient(int64_t index);  // false: not usable, and remembered as this step's failure
  void record_event(Progress& progress);
  void announce_failure() noexcept;
  void remember_failure(ErrorKind kind, const std::string& text);
  void fire_locked(bool everything);
  void submit_agreement_locked(const std::vector<bool>& used);
  void submit_bucket_locked(size_t index);
  std::vector<bool> used_locked() const;
  std::vector<int64_t> survey_locked();
  void begin_round_locked();
  std::vector<int64_t> left_out_locked() const;
  void take_stock(std::optional<bool> left_out_somewhere);
  void reset_locked();
  void call_roll_locked(bool present);
  void finish_roll(bool raise_early);
  void scale_to_active();

  void finish(bool abandoned);
  Agreement complete();
  void finish_alone(bool abandoned);
  struct Planned {
    std::shared_ptr<Bucket> bucket;
    std::shared_ptr<BucketWork> work;
  };
  void keep(const Bucket& bucket);
  void run_bucket(const Planned& planned, Events& events);
  void run_guarded(const std::string& what, const std::function<void()>& task);
  void adopt_used(const Agreement& agreement, size_t first_bucket);
  void raise_disagreement(const Agreement& agreement, bool abandoned);
  void share_arrival_order();
  [[noreturn]] void rethrow_with_context(const std::string& context);
  [[noreturn]] void fail_wait();  // in a catch
  void look_around() const;       // while a thread waits: throws if it must not any more
  std::string stall_facts() const;
  std::string place() const;  // "rank 3/8 step 120"

  CommunicatorPtr comm_;
  CommunicatorPtr control_;
  std::vector<at::Tensor> params_;
  std::vector<std::string> names_;
  std::function<void()> on_late_;
  std::function<void(std::vector<int64_t>)> on_order_;
  std::function<void()> on_end_;

  mutable std::mutex mutex_;  // guards what autograd's threads and the caller share while a backward runs
  std::vector<Planned> buckets_;
  std::vector<Slot> slots_;
  std::vector<Progress> progress_;
  std::vector<int64_t> arrival_;
  std::shared_ptr<AgreementRound> round_;
  size_t next_ = 0;
  bool in_backward_ = false;
  int graph_task_ = -1;  // autograd's number of the backward that the output's gradient came in
  std::atomic<bool> sync_{true};
  std::atomic<bool> lockstep_{true};
  bool in_lockstep_ = true;  // this backward: what lockstep_ was when it began
  std::atomic<bool> late_{false};
  bool closed_ = false;
  std::optional<std::pair<ErrorKind, std::string>> failure_;  // of this rank, in this backward
  std::optional<std::string> broken_;
  mutable std::mutex stall_mutex_;
  std::string stall_;
  std::atomic<bool> stopped_{false};
  std::atomic<int64_t> step_{0};
  std::atomic<int64_t> optimizer_steps_{0};
  bool order_shared_ = false;
  bool static_graph_ = false;
  bool counted_ = false;  // the arrivals of its first backward
  std::atomic<bool> keeps_gradients_{false};
  std::map<int64_t, at::Tensor> kept_;
  std::vector<int64_t> left_out_;
  bool left_out_somewhere_ = false;
  struct Join {
    bool mean_of_active = false;
    bool raise_early = false;
    std::function<bool()> on_begin;
  };
  std::optional<Join> join_;
  std::shared_ptr<RollCall> roll_;  // of this backward, in a join
  bool shadowing_ = false;
  std::optional<int64_t> passes_;  // in rounds: the gradients that make a parameter complete
  std::optional<std::string> ended_early_;
  std::unique_ptr<Executor> executor_;
};

}  // namespace gossamer
