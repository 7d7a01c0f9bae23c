// See comm_hook.h.
#include "hook/comm_hook.h"

#include <algorithm>
#include <sstream>

#include "collectives/two_shot.h"
#include "errors.h"

namespace gossamer {
namespace {

using Storages = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

CommHook::FuturePtr new_future(const at::Device& device) {
  std::vector<c10::Device> devices;
  if (!device.is_cpu()) devices.push_back(device);
  return c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get(), std::move(devices));
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  raise_python(ErrorKind::config, "hooks: ", parts...);
}

}  // namespace

CommHook::CommHook(CommunicatorPtr comm, CommunicatorPtr control, std::vector<at::Tensor> params,
                   Arrange arrange)
    : params_(std::move(params)), arrange_(std::move(arrange)), worker_(std::move(comm), std::move(control)) {
  for (size_t i = 0; i < params_.size(); ++i)
    numbers_.emplace(params_[i].unsafeGetTensorImpl(), static_cast<int64_t>(i));
}

void CommHook::close() {
  if (closed_.exchange(true)) return;
  worker_.stop(unfinished_ > 0, "dropped its communication hook in the middle of a step");
}

void CommHook::set_steps(int64_t steps) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = steps - 1;
  for (size_t i = 0; i < params_.size(); ++i)
    seen_.insert(static_cast<int64_t>(i));  // the next gradient begins a step
}

int64_t CommHook::number_of(const at::Tensor& param, int64_t index) const {
  const auto found = numbers_.find(param.unsafeGetTensorImpl());
  if (found != numbers_.end()) return found->second;
  refuse("bucket ", index, " holds a parameter ", param.sizes(),
         " that does not belong to the model of this State; make one State for each model");
}

CommHook::FuturePtr CommHook::reduce_bucket(const c10d::GradBucket& bucket, c10::IValue result) {
  Message message;
  message.index = static_cast<int64_t>(bucket.getIndex());
  message.buffer = bucket.getBuffer();
  if (message.buffer.layout() != at::kStrided) refuse("sparse gradients cannot be sent through a codec");
  for (const auto& gradient : bucket.getGradients())
    message.offsets.push_back(gradient.storage_offset() - message.buffer.storage_offset());
  for (const auto& param : bucket.getParameters()) {
    message.numbers.push_back(number_of(param, message.index));
    message.unused.push_back(!param.grad().defined());
  }
  return submit(std::move(message), std::move(result));
}

CommHook::FuturePtr CommHook::reduce_gradient(const at::Tensor& grad, const at::Tensor& param,
                                              c10::IValue result) {
  Message message;
  const int64_t number = number_of(param, -1);
  if (grad.layout() != at::kStrided || !grad.is_non_overlapping_and_dense())
    refuse("a gradient must be dense, got one that is sparse or has holes in its memory");
  message.index = number;
  message.buffer = grad.detach().as_strided({grad.numel()}, {1});
  message.offsets = {0};
  message.numbers = {number};
  message.unused = {false};
  return submit(std::move(message), std::move(result));
}

CommHook::FuturePtr CommHook::submit(Message message, c10::IValue result) {
  const at::Device device = worker_.comm().device();
  if (closed_) refuse("this State is closed; make another and register it with the model wrapped again");
  if (message.buffer.device().type() != device.type())
    refuse("gradients must be on ", device, " as the group, got ", message.buffer.device());
  to_dtype(message.buffer.scalar_type(), "hooks: gradients");  // throws here rather than on the worker
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto again = [this](int64_t number) { return seen_.count(number) != 0; };
    if (step_ < 0 || std::any_of(message.numbers.begin(), message.numbers.end(), again)) {
      seen_.clear();
      ++step_;
    }
    seen_.insert(message.numbers.begin(), message.numbers.end());
    message.step = step_;
  }
  auto future = new_future(message.buffer.device());
  const auto storage = message.buffer.storage().getWeakStorageImpl();
  if (worker_.comm().size() == 1) {
    future->markCompleted(std::move(result), Storages{storage});
    return future;
  }
  Executor& executor = worker_.executor();
  if (const auto side = executor.side_stream()) message.buffer.record_stream(*side);
  ++unfinished_;
  const auto number = executor.submit_behind_current(
      [this, future, storage, message = std::move(message), result = std::move(result)]() mutable {
        try {
          if (failure_) std::rethrow_exception(failure_);
          run(message);
        } catch (...) {
          failure_ = std::current_exception();
          --unfinished_;
          future->setError(failure_);
          return;
        }
        --unfinished_;
        future->markCompleted(std::move(result), Storages{storage});
      });
  worker_.keep_order(number);
  return future;
}

void CommHook::run(const Message& message) {
  worker_.set_step(message.step);
  std::ostringstream what;
  what << "bucket " << message.index << " of DDP ("
       << readable_bytes(static_cast<int64_t>(message.buffer.nbytes())) << ")";
  worker_.run_guarded(what.str(), [&] {
    for (const auto& [bucket, work, positions] : parts_of(message)) {
      std::vector<uint8_t*> gradients;
      std::vector<bool> unused;
      for (const size_t position : positions) {
        const auto begin = message.offsets[position] * static_cast<int64_t>(message.buffer.element_size());
        gradients.push_back(bytes_of(message.buffer) + begin);
        unused.push_back(message.unused[position]);
      }
      bucket->set_step(message.step);
      const double scale = work->gather_scale(worker_.comm());
      work->run_around(worker_.comm(), bucket, bucket->around(gradients, std::move(unused), scale));
    }
  });
}

const std::vector<CommHook::Part>& CommHook::parts_of(const Message& message) {
  const auto found = arranged_.find(message.index);
  const at::ScalarType dtype = message.buffer.scalar_type();
  if (found != arranged_.end() && found->second.numbers == message.numbers && found->second.dtype == dtype)
    return found->second.parts;
  const std::unordered_set<int64_t> wanted(message.numbers.begin(), message.numbers.end());
  const bool anew = std::any_of(arranged_.begin(), arranged_.end(), [&](const auto& known) {
    const auto& numbers = known.second.numbers;
    return std::any_of(numbers.begin(), numbers.end(),
                       [&](int64_t number) { return wanted.count(number) != 0; });
  });
  if (anew) arranged_.clear();  // DDP has made its buckets anew
  Arranged arranged{message.numbers, dtype, {}};
  for (auto& [bucket, work] : arrange_(message.index, message.numbers, dtype, anew)) {
    std::vector<size_t> positions;
    for (const int64_t number : bucket->indices()) {
      const auto at = std::find(message.numbers.begin(), message.numbers.end(), number);
      positions.push_back(static_cast<size_t>(at - message.numbers.begin()));
    }
    arranged.parts.push_back({std::move(bucket), std::move(work), std::move(positions)});
  }
  return arranged_.insert_or_assign(message.index, std::move(arranged)).first->second.parts;
}

}  // namespace gossamer
