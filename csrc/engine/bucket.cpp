// Flat memory and its views; see bucket.h.
#include "engine/bucket.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>
#include <sstream>
#include <utility>

#include "collectives/two_shot.h"
#include "device_kernels.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr int64_t kViewAlignmentBytes = 64;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Gradients keep their parameter's strides where the parameter is dense, as autograd lays them out.
at::Tensor view_like(const at::Tensor& flat, int64_t offset, const at::Tensor& param) {
  const auto part = flat.narrow(0, offset, param.numel());
  if (param.is_non_overlapping_and_dense()) {
    return part.as_strided(param.sizes(), param.strides(), part.storage_offset());
  }
  return part.view(param.sizes());
}

// The engine reports a gradient that does not fit; here it must only not be touched.
bool fits(const at::Tensor& grad, const at::Tensor& flat) {
  return grad.layout() == at::kStrided && grad.scalar_type() == flat.scalar_type() &&
         grad.device() == flat.device() && !grad.requires_grad();
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

}  // namespace

Bucket::Bucket(int64_t index, std::vector<int64_t> indices, std::vector<at::Tensor> params, int64_t block,
               int64_t alignment, Communicator& comm)
    : index_(index), indices_(std::move(indices)), params_(std::move(params)) {
  const auto type = params_.at(0).scalar_type();
  const int64_t element = params_[0].element_size();
  const int64_t step = std::lcm(kViewAlignmentBytes / element, block);
  for (const auto& param : params_) {
    offsets_.push_back(numel_);
    numel_ += round_up(param.numel(), step);
  }
  numel_ = round_up(std::max<int64_t>(numel_, 1), std::lcm(alignment, step));
  grad_ = comm.allocate(numel_ * element).view(type);
  for (size_t i = 0; i < params_.size(); ++i) views_.push_back(view_like(grad_, offsets_[i], params_[i]));
  taken_.assign(params_.size(), false);
}

at::Tensor Bucket::flat(const std::string& field) const {
  if (field != "grad") {
    throw PythonError(ErrorKind::config,
                      "Bucket.flat: this bucket holds the field 'grad' only, got '" + field + "'");
  }
  return grad_;
}

std::vector<at::Tensor> Bucket::views(const std::string& field) const {
  flat(field);
  return views_;
}

void Bucket::take(size_t position, double scale) {
  const at::Tensor grad = params_[position].grad();
  if (!grad.defined() || !fits(grad, grad_) || !is_fresh(grad, position)) return;
  copy_in({position}, scale);
  taken_[position] = true;
}

void Bucket::gather(double scale) {
  std::vector<size_t> left;
  for (size_t position = 0; position < params_.size(); ++position) {
    if (!taken_[position]) left.push_back(position);
  }
  copy_in(left, scale);
  taken_.assign(params_.size(), false);
}

bool Bucket::is_fresh(const at::Tensor& grad, size_t position) const {
  return grad.data_ptr() != views_[position].data_ptr();
}

void Bucket::copy_in(const std::vector<size_t>& positions, double scale) {
  std::vector<flat::Segment> segments;
  std::vector<at::Tensor> keep_alive;
  for (const size_t i : positions) {
    const at::Tensor& grad = params_[i].grad();
    const int64_t numel = views_[i].numel();
    if (!grad.defined() || !fits(grad, grad_)) {
      segments.push_back({nullptr, offsets_[i], numel});
      continue;
    }
    const bool fresh = is_fresh(grad, i);
    if (fresh && grad.is_cuda()) {
      const c10::impl::VirtualGuardImpl device(grad.device().type());
      grad.record_stream(device.getStream(grad.device()));
    }
    if (fresh && !same_layout(grad, views_[i])) {
      views_[i].copy_(grad);
      segments.push_back({views_[i].data_ptr(), offsets_[i], numel});
    } else {
      segments.push_back({grad.data_ptr(), offsets_[i], numel});
    }
    if (fresh) {
      keep_alive.push_back(grad);  // until the copy below has read it
      params_[i].mutable_grad() = views_[i];
    }
  }
  const auto dtype = to_dtype(grad_.scalar_type(), "Bucket.gather");
  device_kernels(grad_.device().type())
      .gather(dtype, segments.data(), static_cast<int64_t>(segments.size()), grad_.data_ptr(), scale);
}

void Bucket::clear_padding() {
  std::vector<flat::Segment> segments;
  for (size_t i = 0; i < views_.size(); ++i) {
    const int64_t begin = offsets_[i] + views_[i].numel();
    const int64_t end = i + 1 < views_.size() ? offsets_[i + 1] : numel_;
    if (begin < end) segments.push_back({nullptr, begin, end - begin});
  }
  const auto dtype = to_dtype(grad_.scalar_type(), "Bucket.clear_padding");
  device_kernels(grad_.device().type())
      .gather(dtype, segments.data(), static_cast<int64_t>(segments.size()), grad_.data_ptr(), 1.0);
}

std::string Bucket::describe() const {
  std::ostringstream text;
  text << "bucket " << index_ << " (grad, " << readable_bytes(bytes()) << ")";
  return text.str();
}

}  // namespace gossamer
