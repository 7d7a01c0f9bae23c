// What the engine runs for a ready bucket. A native work needs no GIL; PythonWork (python/callable.h) calls an algorithm's
// bucket_ready. Both run on the engine's executor.
#pragma once

#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/two_shot.h"
#include "engine/bucket.h"

namespace gossamer {

class BucketWork {
 public:
  virtual ~BucketWork() = default;
  // The factor that gradients are multiplied by while they are gathered into the bucket.
  virtual double gather_scale(const Communicator&) const { return 1.0; }
  virtual void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) = 0;
  // Whether runs for two buckets share nothing but the group, and may go on at the same time on the device.
  virtual bool overlaps() const { return false; }
  // run() for gradients that `around` copies into the bucket and back: all at once, or part by part where the work sends
  // parts.
  virtual void run_around(Communicator& comm, const std::shared_ptr<Bucket>& bucket, const Around& around) {
    around.before(bucket->numel(), 0, bucket->numel());
    run(comm, bucket);
    around.after(bucket->numel(), 0, bucket->numel());
  }
  // Why a CUDA graph cannot hold it. Empty if it consists of kernels and group operations alone, the same in each step.
  virtual std::string capture_refusal() const {
    return "its algorithm decides on the host, in Python or by counting steps, what a step does";
  }
};

// The group's own all-reduce. The mean is taken before the sum, as torch DDP does, so that float16 does not
// overflow.
class NativeAllReduce : public BucketWork {
 public:
  explicit NativeAllReduce(bool average) : average_(average) {}
  double gather_scale(const Communicator& comm) const override { return average_ ? 1.0 / comm.size() : 1.0; }
  void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) override;
  std::string capture_refusal() const override { return ""; }

 private:
  bool average_;
  Scratch scratch_;
};

// The group's own sum, with a factor before it and one after it. Each factor rounds once to the gradient's dtype.
class ScaledAllReduce : public BucketWork {
 public:
  ScaledAllReduce(double prescale, double postscale) : prescale_(prescale), postscale_(postscale) {}
  double gather_scale(const Communicator&) const override { return prescale_; }
  void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) override;
  std::string capture_refusal() const override { return ""; }

 private:
  double prescale_;
  double postscale_;
  Scratch scratch_;
};

// The two-shot all-reduce through a codec; Identity makes it the deterministic exact one. It uses error feedback where
// the bucket has a field "error".
class CodecAllReduce : public BucketWork {
 public:
  CodecAllReduce(CodecChoice codec, bool average) : codec_(codec), average_(average) {}
  void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) override {
    run_around(comm, bucket, {});
  }
  bool overlaps() const override { return true; }
  void run_around(Communicator& comm, const std::shared_ptr<Bucket>& bucket, const Around& around) override;
  std::string capture_refusal() const override {
    return codec_.stochastic ? "its codec would round by the same random numbers in every replay" : "";
  }

 private:
  CodecChoice codec_;
  bool average_;
  Scratch scratch_;
};

// Runs another work and measures the time of its runs, on the device, because from here the work is only queued.
class TimedWork : public BucketWork {
 public:
  explicit TimedWork(std::shared_ptr<BucketWork> work) : work_(std::move(work)) {}
  double gather_scale(const Communicator& comm) const override { return work_->gather_scale(comm); }
  void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) override;
  std::string capture_refusal() const override { return "autotune is still measuring"; }
  // Seconds of each run since the last call. Waits for the device.
  std::vector<double> take_seconds();

 private:
  using Events = std::pair<c10::Event, c10::Event>;
  std::shared_ptr<BucketWork> work_;
  std::mutex mutex_;  // the worker runs; any thread may ask
  std::vector<double> seconds_;
  std::vector<Events> events_;
};

class NoWork : public BucketWork {
 public:
  void run(Communicator&, const std::shared_ptr<Bucket>&) override {}
};

// For algorithms that leave each rank its own gradients. A NaN or Inf in a parameter's gradient puts a NaN into that
// of all ranks, so that a GradScaler skips the same steps on all ranks, as where gradients are averaged. Four bytes a
// parameter.
class AgreeOnFinite : public BucketWork {
 public:
  void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) override;
};

}  // namespace gossamer
