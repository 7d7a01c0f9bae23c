// See comm_hook.h. The two-shot gives row j of its flat memory to rank j. Here every parameter has a part in each row:
// equal shares of its blocks, the rest dealt out on from where the parameter before it stopped. So a block's owner
// does not depend on the bucket, rows are about equally long, and no block holds two parameters.
#include "engine/comm_hook.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "device_kernels.h"
#include "engine/work.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr int64_t kLeastUnit = 16;  // elements: pieces begin at multiples of 32 bytes or more

using Storages = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

at::ScalarType wide(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

CommHook::FuturePtr new_future(const at::Device& device) {
  std::vector<c10::Device> devices;
  if (!device.is_cpu()) devices.push_back(device);
  return c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get(), std::move(devices));
}

// What of each segment, none of which is in two rows, lies in elements [begin, begin + numel) of its row of `chunk`.
std::vector<flat::Segment> within(const std::vector<flat::Segment>& segments, int64_t chunk, int64_t begin,
                                  int64_t numel, int64_t element) {
  std::vector<flat::Segment> parts;
  for (const flat::Segment& segment : segments) {
    const int64_t row = segment.offset / chunk * chunk;
    const int64_t first = std::max(segment.offset, row + begin);
    const int64_t last = std::min(segment.offset + segment.numel, row + begin + numel);
    if (first >= last) continue;
    auto* values = static_cast<uint8_t*>(segment.tensor);
    if (values != nullptr) values += (first - segment.offset) * element;
    parts.push_back({values, first, last - first});
  }
  return parts;
}

[[noreturn]] void refuse(const std::string& text) { throw PythonError(ErrorKind::config, "hooks: " + text); }

}  // namespace

CommHook::CommHook(CommunicatorPtr comm, std::vector<at::Tensor> params, std::vector<HookMethod> methods,
                   std::vector<int64_t> method_of, Whole whole)
    : comm_(std::move(comm)),
      params_(std::move(params)),
      methods_(std::move(methods)),
      method_of_(std::move(method_of)),
      whole_(std::move(whole)),
      placed_(params_.size(), false),
      errors_(params_.size()),
      scratches_(methods_.size()),
      executor_(comm_->device()) {
  std::vector<int64_t> units(methods_.size(), 0);
  for (auto& method : methods_) method.unit = std::max(method.unit, kLeastUnit);
  for (size_t i = 0; i < params_.size(); ++i) {
    numbers_.emplace(params_[i].unsafeGetTensorImpl(), static_cast<int64_t>(i));
    if (whole_) continue;
    const auto method = static_cast<size_t>(method_of_.at(i));
    const int64_t unit = methods_.at(method).unit;
    first_unit_.push_back(units[method]);
    units[method] += (params_[i].numel() + unit - 1) / unit;
  }
}

void CommHook::close() {
  if (closed_) return;
  closed_ = true;
  if (executor_.busy()) comm_->announce_failure("dropped its communication hook in the middle of a step");
  executor_.stop();
}

void CommHook::wait() { executor_.wait(raise_interrupt); }

void CommHook::set_steps(int64_t steps) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = steps - 1;
  for (size_t i = 0; i < params_.size(); ++i)
    seen_.insert(static_cast<int64_t>(i));  // the next begins a step
}

int64_t CommHook::number_of(const at::Tensor& param, int64_t index) const {
  const auto found = numbers_.find(param.unsafeGetTensorImpl());
  if (found != numbers_.end()) return found->second;
  std::ostringstream text;
  text << "bucket " << index << " holds a parameter " << param.sizes()
       << " that is not of the model that State was given; make a State for each model";
  refuse(text.str());
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
  if (closed_) refuse("this State is closed; make another and register it with the model wrapped again");
  if (message.buffer.device().type() != comm_->device().type()) {
    std::ostringstream text;
    text << "gradients must be on " << comm_->device() << " as the group, got " << message.buffer.device();
    refuse(text.str());
  }
  to_dtype(message.buffer.scalar_type(), "hooks: gradients");  // refused here rather than on the worker
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
  if (comm_->size() == 1) {
    future->markCompleted(std::move(result), Storages{storage});
    return future;
  }
  if (const auto side = executor_.side_stream()) message.buffer.record_stream(*side);
  executor_.submit_behind_current(
      [this, future, storage, message = std::move(message), result = std::move(result)]() mutable {
        try {
          if (failure_) std::rethrow_exception(failure_);
          run(message);
        } catch (...) {
          if (!failure_) comm_->announce_failure();
          failure_ = std::current_exception();
          future->setError(failure_);
          return;
        }
        future->markCompleted(std::move(result), Storages{storage});
      });
  return future;
}

std::string CommHook::place_of(const Message& message) const {
  std::ostringstream text;
  text << "rank " << comm_->rank() << "/" << comm_->size() << " step " << message.step << " bucket "
       << message.index << " of DDP (" << readable_bytes(static_cast<int64_t>(message.buffer.nbytes()))
       << "): ";
  return text.str();
}

void CommHook::run(const Message& message) {
  try {
    if (whole_) return run_whole(message);
    auto& groups = layout_of(message).groups;
    for (size_t i = 0; i < groups.size(); ++i) {
      // Any number that differs from bucket to bucket and from step to step.
      const auto nonce = codec::make_key(0, static_cast<uint64_t>(message.step), i + 1,
                                         static_cast<uint64_t>(message.index));
      run_group(message, groups[i], nonce);
    }
  } catch (PythonError& error) {
    throw PythonError(error.kind, place_of(message) + error.what());
  } catch (const Error& error) {
    throw PythonError(error.kind, place_of(message) + error.what());
  }
}

void CommHook::run_whole(const Message& message) {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < message.numbers.size(); ++i) {
    const at::Tensor& param = params_[static_cast<size_t>(message.numbers[i])];
    const auto part = message.buffer.narrow(0, message.offsets[i], param.numel());
    const bool dense = param.is_non_overlapping_and_dense();
    gradients.push_back(dense ? part.as_strided(param.sizes(), param.strides(), part.storage_offset())
                              : part.view(param.sizes()));
  }
  whole_(message.step, message.index, message.numbers, gradients);
}

void CommHook::run_group(const Message& message, Group& group, uint64_t nonce) {
  const auto& kernels = device_kernels(message.buffer.device().type());
  const Dtype dtype = to_dtype(message.buffer.scalar_type(), "hooks");
  const auto element = static_cast<int64_t>(message.buffer.element_size());
  std::vector<flat::Segment> segments;
  std::vector<at::Tensor> unsent, kept;  // errors of parameters without a gradient wait for the next one
  for (const auto& member : group.members) {
    for (const auto& piece : member.pieces) {
      uint8_t* values = bytes_of(message.buffer) + (message.offsets[member.position] + piece.begin) * element;
      segments.push_back({values, piece.offset, piece.numel});
      if (!group.error.defined() || !message.unused[member.position]) continue;
      unsent.push_back(group.error.narrow(0, piece.offset, piece.numel));
      kept.push_back(unsent.back().clone());
      unsent.back().zero_();
    }
  }
  const Around around{
      [&](int64_t chunk, int64_t begin, int64_t numel) {
        auto parts = within(segments, chunk, begin, numel, element);
        // Padding holds what the codec made of it in the step before.
        const auto padding = within(group.padding, chunk, begin, numel, element);
        parts.insert(parts.end(), padding.begin(), padding.end());
        kernels.gather(dtype, parts.data(), static_cast<int64_t>(parts.size()), group.flat.data_ptr(), 1.0);
      },
      [&](int64_t chunk, int64_t begin, int64_t numel) {
        const auto parts = within(segments, chunk, begin, numel, element);
        kernels.scatter(dtype, parts.data(), static_cast<int64_t>(parts.size()), group.flat.data_ptr(), 1.0);
      }};
  const HookMethod& method = methods_[group.method];
  const double scale = 1.0 / comm_->size();
  Scratch& scratch = scratches_[group.method];
  if (method.codec && !group.error.defined())
    return two_shot::all_reduce(*comm_, *method.codec, group.flat, scale, scratch, nonce, around);
  std::optional<at::Tensor> error;
  if (group.error.defined()) {
    error = group.error;
    kernels.gather(to_dtype(error->scalar_type(), "hooks"), group.padding.data(),
                   static_cast<int64_t>(group.padding.size()), error->data_ptr(), 1.0);
  }
  if (method.codec) {
    two_shot::all_reduce_with_error(*comm_, *method.codec, group.flat, scale, scratch, nonce, *error, around);
  } else {
    const int64_t all = group.flat.numel();
    around.before(all, 0, all);
    method.call(group.flat, error, nonce);
    around.after(all, 0, all);
  }
  for (size_t i = 0; i < unsent.size(); ++i) unsent[i].add_(kept[i]);
}

CommHook::Layout& CommHook::layout_of(const Message& message) {
  const auto found = layouts_.find(message.index);
  const at::ScalarType dtype = message.buffer.scalar_type();
  if (found != layouts_.end() && found->second.numbers == message.numbers && found->second.dtype == dtype)
    return found->second;
  const auto placed = [this](int64_t number) { return placed_[static_cast<size_t>(number)]; };
  if (std::any_of(message.numbers.begin(), message.numbers.end(), placed))
    store_errors();  // DDP has made its buckets anew
  Layout layout{message.numbers, dtype, {}};
  for (size_t method = 0; method < methods_.size(); ++method) {
    std::vector<size_t> positions;
    for (size_t i = 0; i < message.numbers.size(); ++i) {
      const auto number = static_cast<size_t>(message.numbers[i]);
      if (method_of_[number] == static_cast<int64_t>(method) && params_[number].numel() > 0)
        positions.push_back(i);
    }
    if (positions.empty()) continue;
    layout.groups.push_back(place(message, method, std::move(positions)));
    load_errors(layout, layout.groups.back());
  }
  return layouts_.insert_or_assign(message.index, std::move(layout)).first->second;
}

CommHook::Group CommHook::place(const Message& message, size_t method, std::vector<size_t> positions) {
  const int64_t ranks = comm_->chunks();  // or the parts of a sum by hosts
  const int64_t unit = methods_[method].unit;
  Group group{method, {}, {}, {}, {}};
  std::vector<int64_t> filled(static_cast<size_t>(ranks), 0);
  std::vector<Piece> gaps;
  for (const size_t position : positions) {
    const auto number = static_cast<size_t>(message.numbers[position]);
    const int64_t numel = params_[number].numel();
    const int64_t units = (numel + unit - 1) / unit;
    const int64_t first = first_unit_[number] % ranks;
    Member member{position, {}};
    int64_t begin = 0;
    for (int64_t row = 0; row < ranks; ++row) {
      const int64_t share = units / ranks + ((row - first + ranks) % ranks < units % ranks ? 1 : 0);
      if (share == 0) continue;
      int64_t& end = filled[static_cast<size_t>(row)];
      const int64_t valid = std::min(share * unit, numel - begin);
      member.pieces.push_back({row, begin, valid, end});
      gaps.push_back({row, 0, share * unit - valid, end + valid});
      end += share * unit;
      begin += valid;
    }
    group.members.push_back(std::move(member));
    placed_[number] = true;
  }
  const int64_t chunk = *std::max_element(filled.begin(), filled.end());
  for (int64_t row = 0; row < ranks; ++row) {
    const int64_t end = filled[static_cast<size_t>(row)];
    gaps.push_back({row, 0, chunk - end, end});
  }
  for (auto& member : group.members)
    for (auto& piece : member.pieces) piece.offset += piece.row * chunk;
  for (const auto& gap : gaps)
    if (gap.numel > 0) group.padding.push_back({nullptr, gap.row * chunk + gap.offset, gap.numel});
  const int64_t bytes = ranks * chunk * static_cast<int64_t>(message.buffer.element_size());
  group.flat = comm_->allocate(bytes).view(message.buffer.scalar_type());
  return group;
}

void CommHook::load_errors(const Layout& layout, Group& group) {
  if (!methods_[group.method].feedback) return;
  const auto dtype = wide(layout.dtype);
  group.error = at::zeros(group.flat.sizes(), group.flat.options().dtype(dtype));
  for (const auto& member : group.members) {
    at::Tensor& own = errors_[static_cast<size_t>(layout.numbers[member.position])];
    if (!own.defined()) continue;
    for (const auto& piece : member.pieces)
      group.error.narrow(0, piece.offset, piece.numel).copy_(own.narrow(0, piece.begin, piece.numel));
    // It may be of the caller's stream, which would use its memory anew before this one has read it.
    if (const auto side = executor_.side_stream()) own.record_stream(*side);
    own = at::Tensor();
  }
}

void CommHook::store_errors() {
  for (auto& [index, layout] : layouts_) {
    for (auto& group : layout.groups) {
      if (!group.error.defined()) continue;
      for (const auto& member : group.members) {
        const auto number = static_cast<size_t>(layout.numbers[member.position]);
        at::Tensor own = at::empty({params_[number].numel()}, group.error.options());
        for (const auto& piece : member.pieces)
          own.narrow(0, piece.begin, piece.numel).copy_(group.error.narrow(0, piece.offset, piece.numel));
        errors_[number] = own;
      }
      if (group.error.is_cuda()) {  // of the worker's stream, read on this one
        const c10::impl::VirtualGuardImpl guard(group.error.device().type());
        group.error.record_stream(guard.getStream(group.error.device()));
      }
    }
  }
  layouts_.clear();
  placed_.assign(params_.size(), false);
}

std::vector<std::optional<at::Tensor>> CommHook::errors() {
  wait();
  store_errors();
  std::vector<std::optional<at::Tensor>> all;
  for (const auto& error : errors_)
    all.push_back(error.defined() ? std::make_optional(error.clone()) : std::nullopt);
  return all;
}

void CommHook::set_errors(std::vector<std::optional<at::Tensor>> errors) {
  wait();
  layouts_.clear();
  placed_.assign(params_.size(), false);
  for (size_t i = 0; i < params_.size(); ++i) errors_[i] = errors.at(i) ? errors[i]->clone() : at::Tensor();
}

}  // namespace gossamer
