// The engine of one model. It owns the objects that a gradient meets, and is called by autograd and Python at the moments
// of a backward. Hooks say that a gradient is ready; the flight sends its bucket in plan order; the worker runs the
// bucket's work; an ending decides what the end of the backward means. Python's gossamer.engine plans the buckets.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/ending/alone.h"
#include "engine/ending/join.h"
#include "engine/ending/lockstep.h"
#include "engine/ending/rounds.h"

namespace gossamer {

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // For the arguments see Worker, Hooks and Lockstep.
  Engine(CommunicatorPtr comm, CommunicatorPtr control, std::vector<at::Tensor> params,
         std::vector<std::string> names, std::function<void()> on_late,
         std::function<void(std::vector<int64_t>)> on_order);
  ~Engine() { close(); }

  // Called between backwards, or in on_late, on_order and on_end. Existing gradients move into the new bucket's memory, if
  // it has a field for them. `work` runs when the bucket's gradients are complete.
  void clear_buckets();
  void append_bucket(const std::shared_ptr<Bucket>& bucket, std::shared_ptr<BucketWork> work);

  // Continues as an engine that has ended so many synchronised backwards and optimizer steps, in the current plan.
  void resume(int64_t step, int64_t optimizer_steps);
  void close(std::string why = "");  // idempotent; for `why` see Worker::mark_closed()

  // Settings of the backwards that begin later: whether they communicate, and what their end means (one of endings()).
  void set_sync(bool sync) { sync_ = sync; }
  bool sync() const { return sync_; }
  // The same for backwards that begin at a hooked output, where these follow their forward and not the place where they
  // run. Others follow sync, because nobody has seen their forward.
  void set_output_sync(bool sync) { output_sync_ = sync ? 1 : 0; }
  void end_by(Ending& ending);

  // `on_begin` is called when a backward that communicates begins, in its thread, before its first bucket is sent.
  void set_on_begin(std::function<void()> on_begin) { on_begin_ = std::move(on_begin); }

  // Called when the model's output gets its gradient, which is before any parameter does and in the outermost backward.
  // torch.autograd.grad does not touch param.grad, and the engine ignores it.
  void output_gradient();

  // If the last backward raised before its end, completes its communication so that no rank waits for this one.
  void abandon();

  void end_round();  // see Rounds

  // For a rank without input, in a join: takes part in one synchronised backward of the others, with zeros. Gradients
  // that exist are dropped. Returns false, and sends nothing, if no rank has input.
  bool shadow();

  // Sends the gradients that the parameters have, as one synchronised backward. For a backward whose group has been lost.
  void redo();

  // Why a CUDA graph cannot hold a step of this engine as it is now; empty if it can. Events, kernels and collectives of
  // a capturable group go into the graph whatever thread queues them, also the worker, because its side stream joins the
  // capture by the first event. What the host does happens once, at capture: hooks, counters, the agreement.
  std::string capture_refusal() const;
  void check_capture() const;  // throws that, where the current stream captures

  struct Endings {
    Lockstep lockstep;
    Alone alone;
    Rounds rounds;
  };
  const Parts& parts() const { return parts_; }
  Endings& endings() { return endings_; }

 private:
  // Of a backward, if it communicates, which it returns; idempotent. `of_output`: at a hooked output that is to be sent.
  bool begin(bool of_output);
  bool output_sync() const { return output_sync_ < 0 ? sync_.load() : output_sync_ > 0; }
  void mute();
  void lose_backward();  // with the mutex
  void on_gradient(int64_t index, bool arrived);
  void finish(bool abandoned);
  void reset();  // with the mutex

  std::mutex mutex_;  // see Parts
  Worker worker_;
  Hooks hooks_;
  Flight flight_;
  Join join_;
  Parts parts_{mutex_, worker_, hooks_, flight_, join_};
  Endings endings_;
  std::atomic<bool> sync_{true};
  std::atomic<int> output_sync_{-1};  // below 0: as sync_
  std::weak_ptr<int> muted_;          // alive while a backward runs whose output's forward was not to be sent
  std::atomic<Ending*> chosen_ = &endings_.lockstep;
  Ending* ending_ = chosen_;  // of this backward: what was chosen when it began
  std::function<void()> on_begin_;
  bool in_backward_ = false;
  std::optional<std::weak_ptr<int>> until_end_;  // alive as long as autograd can still end this backward
  int graph_task_ = -1;  // autograd's number of the backward in which the output's gradient came
};

}  // namespace gossamer
