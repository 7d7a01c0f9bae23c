// The buckets of one model on their way. Each bucket goes to the worker when its gradients are complete, in plan order, so
// that every rank issues its collectives in one order, whatever order gradients come in. The bucket's BucketWork says what
// is done with it; the ending says what goes with the last one.
#pragma once

#include <c10/core/Event.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/bucket.h"
#include "engine/work.h"
#include "engine/worker.h"

namespace gossamer {

class Ending;

class Flight {
 public:
  struct Planned {
    std::shared_ptr<Bucket> bucket;
    std::shared_ptr<BucketWork> work;
  };

  Flight(Worker& worker, std::mutex& mutex);  // the engine's mutex

  // --- with the mutex ---

  const std::vector<Planned>& plan() const { return plan_; }
  void clear();
  void append(const std::shared_ptr<Bucket>& bucket, std::shared_ptr<BucketWork> work);
  void reset(const std::vector<int64_t>& awaited);  // gradients that each bucket waits for
  void go_on_from(size_t bucket) { next_ = bucket; }
  void gradient_complete(size_t number, size_t position, Ending& ending);
  void fire_rest(Ending& ending) { fire(ending, /*everything=*/true); }
  uint64_t last_sent() const { return last_sent_; }  // the worker's task

  // What gradients are multiplied by before they are sent. Called by the worker, for each bucket.
  void weigh_by(std::function<double()> weight) { weight_ = std::move(weight); }

  // --- without it ---

  // From the next backward on, keeps a copy of each bucket's gradients from before they are sent: what comes back does not
  // show what a codec did to them. By bucket index. `false` drops the copies.
  void keep_gradients(bool keep);
  std::map<int64_t, at::Tensor> kept_gradients() const;

  // Called between backwards. From then on, keeps what is needed to send a backward again: this rank's own gradients of
  // each bucket, not yet multiplied by the work's scale, and the bucket's other fields from before its work ran.
  void keep_for_redo(bool keep);
  struct Before {
    std::map<std::string, at::Tensor> fields;  // "grad" too
    bool done = false;                         // the work has run to its end since
  };
  std::map<int64_t, Before> before() const;  // of the buckets whose work has begun in this backward

 private:
  using Events = std::vector<std::pair<c10::Stream, c10::Event>>;
  struct Progress {  // of one bucket, in this backward
    int64_t pending = 0;
    Events events;
  };
  void fire(Ending& ending, bool everything);
  void record_event(Progress& progress);
  void submit(size_t bucket);
  struct Sent {
    const Planned& planned;
    size_t number;
    bool first;  // of its backward
    Events events;
  };
  void run(Sent& sent);
  void gather(Sent& sent, const std::optional<c10::Stream>& lane);
  std::optional<c10::Stream> lane_of(const Sent& sent) const;
  void keep(const Bucket& bucket);
  void keep_before(const Bucket& bucket);
  double gather_scale(const BucketWork& work) const;
  void weigh(const Bucket& bucket) const;

  Worker& worker_;
  std::mutex& mutex_;
  // On an accelerator gradients are copied into buckets on a stream of their own: so a bucket need not wait for the transfer
  // of the one before it, and its gradients' memory is free early.
  std::optional<c10::Stream> gather_stream_;
  // Where sums overlap, buckets run on these streams by turns, and one is inside hosts while another is between them. The
  // side stream waits for each, so whatever follows on it comes after them.
  std::vector<c10::Stream> lanes_;
  std::optional<c10::Event> before_lanes_;  // what the side stream held as the first bucket came
  std::vector<Planned> plan_;
  std::vector<Progress> progress_;
  size_t next_ = 0;
  bool has_sent_ = false;  // in this backward
  uint64_t last_sent_ = 0;
  std::function<double()> weight_ = [] { return 1.0; };
  std::atomic<bool> keeps_gradients_{false};
  std::map<int64_t, at::Tensor> kept_;
  std::atomic<bool> redo_{false};
  std::map<int64_t, Before> before_;   // memory of earlier backwards is used again
  std::map<int64_t, bool> has_begun_;  // in this backward, by bucket index
};

}  // namespace gossamer
