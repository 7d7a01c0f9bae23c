// Flat memory and its views; see bucket.h.
#include "engine/bucket.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include "collectives/two_shot.h"
#include "comm/record_use.h"
#include "device_kernels.h"
#include "errors.h"

namespace gossamer {
namespace {

constexpr int64_t kViewAlignmentBytes = 64;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A gradient gets its parameter's strides where the parameter is dense, as autograd lays gradients out.
std::vector<int64_t> strides_of(const at::Tensor& param) {
  return (param.is_non_overlapping_and_dense() ? param : at::empty(param.sizes(), at::kMeta)).strides().vec();
}

// A gradient that does not fit must only be left alone here; the engine reports it.
bool fits(const at::Tensor& grad, const at::Tensor& flat) {
  return grad.layout() == at::kStrided && grad.scalar_type() == flat.scalar_type() &&
         grad.device() == flat.device() && !grad.requires_grad();
}

// The segments of the flat memory that no piece covers.
std::vector<flat::Segment> gaps(const Placement& placement) {
  std::vector<Placement::Piece> all;
  for (const auto& pieces : placement.pieces) all.insert(all.end(), pieces.begin(), pieces.end());
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
  all.push_back({0, 0, placement.numel});
  std::vector<flat::Segment> segments;
  int64_t end = 0;
  for (const auto& piece : all) {
    if (end < piece.offset) segments.push_back({nullptr, end, piece.offset - end});
    end = std::max(end, piece.offset + piece.numel);
  }
  return segments;
}

// The parts of `segments` that lie in elements [begin, begin + numel) of their row of `chunk`. No segment lies in two rows.
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

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

void drop_tensor(void* tensor) { delete static_cast<at::Tensor*>(tensor); }

// The same memory, in a storage that tells who holds this view apart from who holds its neighbours.
at::Tensor with_own_storage(const at::Tensor& view) {
  at::DataPtr memory(view.data_ptr(), new at::Tensor(view), &drop_tensor, view.device());
  const auto bytes = static_cast<size_t>(view.numel()) * view.element_size();
  at::Storage storage(at::Storage::use_byte_size_t(), bytes, std::move(memory), nullptr, false);
  auto own = at::detail::make_tensor<at::TensorImpl>(std::move(storage), view.key_set(), view.dtype());
  own.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides());
  return own;
}

// Gives those who hold this storage a copy of its memory, so that the memory can be written.
void move_elsewhere(const at::Tensor& view) {
  const at::Tensor copy = view.clone(at::MemoryFormat::Preserve);
  view.storage().set_data_ptr_noswap(copy.storage().set_data_ptr(at::DataPtr(nullptr, view.device())));
}

}  // namespace

std::optional<at::Tensor> flat_memory_of(const at::Tensor& weight) {
  if (!weight.has_storage()) return std::nullopt;
  const at::DataPtr& memory = weight.storage().data_ptr();
  if (memory.get_deleter() != &drop_tensor) return std::nullopt;
  return *static_cast<at::Tensor*>(memory.get_context());
}

Placement Placement::in_turn(const std::vector<at::Tensor>& params, int64_t block, int64_t alignment) {
  const int64_t step =
      std::lcm(kViewAlignmentBytes / static_cast<int64_t>(params.at(0).element_size()), block);
  Placement placement;
  for (const auto& param : params) {
    placement.pieces.push_back({{0, param.numel(), placement.numel}});
    placement.numel += round_up(param.numel(), step);
  }
  placement.numel = round_up(std::max<int64_t>(placement.numel, 1), std::lcm(alignment, step));
  return placement;
}

Bucket::Bucket(int64_t index, std::vector<int64_t> indices, std::vector<at::Tensor> params,
               std::vector<std::string> names, Placement placement, std::optional<at::ScalarType> dtype)
    : index_(index),
      indices_(std::move(indices)),
      params_(std::move(params)),
      names_(std::move(names)),
      placement_(std::move(placement)),
      padding_(gaps(placement_)),
      device_(params_.at(0).device()),
      dtype_(dtype.value_or(params_[0].scalar_type())),
      taken_(params_.size(), false),
      unused_(params_.size(), false) {
  for (const auto& param : params_) {
    sizes_.push_back(param.sizes().vec());
    strides_.push_back(strides_of(param));
  }
}

at::Tensor Bucket::shaped(const at::Tensor& flat, int64_t offset, size_t position) const {
  return flat.as_strided(sizes_.at(position), strides_[position], flat.storage_offset() + offset);
}

at::Tensor Bucket::add_field(const std::string& name, Communicator* comm,
                             std::optional<at::ScalarType> dtype) {
  if (has(name)) return flat(name);
  const auto type = dtype.value_or(dtype_);
  Field field;
  if (comm != nullptr) {
    field.flat = comm->allocate(numel() * static_cast<int64_t>(c10::elementSize(type))).view(type);
  } else {
    field.flat = at::zeros({numel()}, at::TensorOptions().dtype(type).device(device_));
  }
  const auto whole = [](const auto& pieces) { return pieces.size() == 1; };
  if (std::all_of(placement_.pieces.begin(), placement_.pieces.end(), whole)) {
    for (size_t i = 0; i < params_.size(); ++i) {
      const auto view = shaped(field.flat, placement_.pieces[i][0].offset, i);
      field.views.push_back(name == "weight" ? with_own_storage(view) : view);
    }
  }
  return fields_.emplace(name, std::move(field)).first->second.flat;
}

std::vector<std::string> Bucket::fields() const {
  std::vector<std::string> names;
  for (const auto& [name, field] : fields_) names.push_back(name);
  return names;
}

const Bucket::Field& Bucket::field(const std::string& name) const {
  const auto found = fields_.find(name);
  if (found == fields_.end()) {
    std::ostringstream text;
    text << "Bucket: no field '" << name << "' in " << describe() << "; it has";
    for (const auto& known : fields()) text << " '" << known << "'";
    raise_python(ErrorKind::config, text.str());
  }
  return found->second;
}

// Everything that works on the memory of a field asks for it here, also on the worker's stream, which may be late when the
// bucket is dropped.
at::Tensor Bucket::flat(const std::string& name) const {
  const at::Tensor& memory = field(name).flat;
  record_use_on_current_stream(memory);
  return memory;
}

const std::vector<at::Tensor>& Bucket::views(const std::string& name) const {
  const auto& views = field(name).views;
  if (views.empty())
    raise_python(ErrorKind::config, "Bucket: the parameters of ", describe(),
                 " lie in pieces and have no views");
  return views;
}

at::Tensor Bucket::piece_of(const std::string& name, const Placement::Piece& piece) const {
  return flat(name).narrow(0, piece.offset, piece.numel);
}

at::Tensor Bucket::value(const std::string& name, size_t position) const {
  const at::Tensor own = at::empty({numel_of(position)}, flat(name).options());
  for (const auto& piece : placement_.pieces[position])
    own.narrow(0, piece.begin, piece.numel).copy_(piece_of(name, piece));
  return shaped(own, 0, position);
}

void Bucket::set_value(const std::string& name, size_t position, const at::Tensor& value) {
  const at::Tensor own = at::empty({numel_of(position)}, flat(name).options());
  shaped(own, 0, position).copy_(value);
  for (const auto& piece : placement_.pieces[position])
    piece_of(name, piece).copy_(own.narrow(0, piece.begin, piece.numel));
}

void Bucket::take(size_t position, double scale) {
  if (!has("grad")) return;
  const at::Tensor grad = params_[position].grad();
  if (!grad.defined() || !fits(grad, flat("grad")) || !is_fresh(grad, position)) return;
  copy_in({position}, scale, {});
  taken_[position] = true;
}

void Bucket::gather(double scale) {
  if (!has("grad")) return;
  std::vector<size_t> left;
  for (size_t position = 0; position < params_.size(); ++position) {
    if (!taken_[position]) left.push_back(position);
  }
  copy_in(left, scale, padding_);
  taken_.assign(params_.size(), false);
  for (size_t i = 0; i < params_.size(); ++i) unused_[i] = !params_[i].grad().defined();
}

Around Bucket::around(const std::vector<uint8_t*>& gradients, std::vector<bool> unused, double scale) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype_));
  std::vector<flat::Segment> all;
  for (size_t i = 0; i < params_.size(); ++i) {
    for (const auto& piece : placement_.pieces[i])
      all.push_back({gradients.at(i) + piece.begin * element, piece.offset, piece.numel});
  }
  unused_ = std::move(unused);
  const auto before = [this, all, element, scale](int64_t chunk, int64_t begin, int64_t numel) {
    auto parts = within(all, chunk, begin, numel, element);
    const auto gaps = within(padding_, chunk, begin, numel, element);
    parts.insert(parts.end(), gaps.begin(), gaps.end());
    fill("grad", parts, scale);
  };
  const auto after = [this, all, element](int64_t chunk, int64_t begin, int64_t numel) {
    const c10::OptionalDeviceGuard guard(device_);
    const auto parts = within(all, chunk, begin, numel, element);
    device_kernels(device_.type())
        .scatter(to_dtype(dtype_, "Bucket.around"), parts.data(), static_cast<int64_t>(parts.size()),
                 flat("grad").data_ptr(), 1.0);
  };
  return {before, after};
}

void Bucket::fill(const std::string& name, const std::vector<flat::Segment>& segments, double scale) {
  const c10::OptionalDeviceGuard guard(device_);
  const at::Tensor memory = flat(name);
  device_kernels(device_.type())
      .gather(to_dtype(memory.scalar_type(), "Bucket"), segments.data(),
              static_cast<int64_t>(segments.size()), memory.data_ptr(), scale);
}

void Bucket::clear_padding(const std::string& name) { fill(name, padding_, 1.0); }

std::vector<std::pair<at::Tensor, at::Tensor>> Bucket::set_aside(const std::string& name) {
  const c10::OptionalDeviceGuard guard(device_);
  std::vector<std::pair<at::Tensor, at::Tensor>> aside;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!unused_[i]) continue;
    for (const auto& piece : placement_.pieces[i]) {
      const at::Tensor part = piece_of(name, piece);
      aside.emplace_back(part, part.clone());
      part.zero_();
    }
  }
  return aside;
}

// Never the bucket's own tensor: `grad.data = ...`, which Module.to does, would take that out of the flat memory.
void Bucket::give_gradient(size_t position) const {
  params_[position].mutable_grad() = views("grad")[position].detach();
}

bool Bucket::is_fresh(const at::Tensor& grad, size_t position) const {
  return grad.data_ptr() != views("grad")[position].data_ptr();
}

void Bucket::copy_in(const std::vector<size_t>& positions, double scale,
                     std::vector<flat::Segment> segments) {
  const auto& [flat_grad, grad_views] = field("grad");
  std::vector<at::Tensor> keep_alive;
  for (const size_t i : positions) {
    const at::Tensor& grad = params_[i].grad();
    const auto& [begin, numel, offset] = placement_.pieces[i][0];
    if (!grad.defined() || !fits(grad, flat_grad)) {
      segments.push_back({nullptr, offset, numel});
      continue;
    }
    const bool fresh = is_fresh(grad, i);
    if (fresh) record_use_on_current_stream(grad);
    if (fresh && !same_layout(grad, grad_views[i])) {
      grad_views[i].copy_(grad);
      segments.push_back({grad_views[i].data_ptr(), offset, numel});
    } else {
      segments.push_back({grad.data_ptr(), offset, numel});
    }
    if (fresh) {
      keep_alive.push_back(grad);  // until the copy below has read it
      give_gradient(i);
    }
  }
  fill("grad", segments, scale);
}

void Bucket::adopt_gradients() {
  for (size_t i = 0; i < params_.size() && has("grad"); ++i) {
    const at::Tensor& grad = params_[i].grad();
    if (!grad.defined() || grad.layout() != at::kStrided) continue;
    record_use_on_current_stream(grad);  // which may be the last to use its memory
    views("grad")[i].copy_(grad.detach());
    give_gradient(i);
  }
}

bool Bucket::is_in_place(size_t position, const at::Tensor& weight) const {
  return params_[position].data_ptr() == weight.data_ptr() && same_layout(params_[position], weight);
}

bool Bucket::strayed() const {
  if (!has("weight")) return false;
  const auto& weights = views("weight");
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!is_in_place(i, weights[i])) return true;
  }
  return false;
}

bool Bucket::weights_held() const {
  if (!has("weight")) return false;
  const auto& weights = views("weight");
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!is_in_place(i, weights[i]) && weights[i].storage().use_count() > 1) return true;
  }
  return false;
}

void Bucket::adopt_weights() {
  const c10::OptionalDeviceGuard guard(device_);
  if (!has("weight")) return;
  auto& weights = fields_.at("weight").views;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (is_in_place(i, weights[i])) continue;
    const at::Tensor data = params_[i].detach();
    if (weights[i].storage().use_count() > 1) {
      move_elsewhere(weights[i]);
      weights[i] = with_own_storage(shaped(flat("weight"), placement_.pieces[i][0].offset, i));
    }
    record_use_on_current_stream(data);
    weights[i].copy_(data);
    params_[i].set_data(weights[i]);
  }
}

void Bucket::rescale(const std::string& name, double scale) {
  if (scale != 1.0) fill(name, {{flat(name).data_ptr(), 0, numel()}}, scale);
}

std::string Bucket::describe() const {
  std::ostringstream text;
  const char* what = has("grad") ? "grad, " : has("weight") ? "weight, " : "";
  text << "bucket " << index_ << " (" << what << readable_bytes(bytes()) << ")";
  return text.str();
}

}  // namespace gossamer
