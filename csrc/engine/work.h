// What the engine runs for a ready bucket. A native work needs no GIL; PythonWork calls an algorithm's
// bucket_ready. Both run on the engine's executor.
#pragma once

#include <pybind11/pybind11.h>

#include "collectives/two_shot.h"
#include "engine/bucket.h"

namespace gossamer {

class BucketWork {
 public:
  virtual ~BucketWork() = default;
  // The factor that gradients are multiplied by while they are gathered into the bucket.
  virtual double gather_scale(const Communicator&) const { return 1.0; }
  virtual void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) = 0;
};

// The group's own all-reduce. The mean is taken before the sum, as torch DDP does, so that float16 does not
// overflow.
class NativeAllReduce : public BucketWork {
 public:
  explicit NativeAllReduce(bool average) : average_(average) {}
  double gather_scale(const Communicator& comm) const override { return average_ ? 1.0 / comm.size() : 1.0; }
  void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) override;

 private:
  bool average_;
};

// The two-shot all-reduce through a codec; Identity makes it the deterministic exact one.
class CodecAllReduce : public BucketWork {
 public:
  CodecAllReduce(CodecChoice codec, bool average) : codec_(codec), average_(average) {}
  void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) override;

 private:
  CodecChoice codec_;
  bool average_;
  Scratch scratch_;
};

// Calls callable(bucket) with the GIL held. The callable wraps its own errors with context.
class PythonWork : public BucketWork {
 public:
  explicit PythonWork(pybind11::object callable);
  void run(Communicator& comm, const std::shared_ptr<Bucket>& bucket) override;

 private:
  std::shared_ptr<pybind11::object> callable_;
};

}  // namespace gossamer
