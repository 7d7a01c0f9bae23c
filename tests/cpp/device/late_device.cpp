// Gives the simulated device of streams.h to torch as the device type PrivateUse1, with its kernels for Gossamer and its
// c10d backend. Operations in place are queued on the current stream. Other operations run at once, after what the current
// stream holds, and copies of their results are queued. tests/support/late_device.py compiles and loads it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "backend.h"
#include "kernels.h"
#include "streams.h"
#include "wired.h"

namespace late {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
thread_local StreamId current = kMain;

c10::Device device() { return {kType, 0}; }
c10::Stream stream_of(StreamId id) {
  return id == kMain ? c10::Stream(c10::Stream::DEFAULT, device())
                     : c10::Stream(c10::Stream::UNSAFE, device(), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(kMain); }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream_of(Device::instance().new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(Device::instance().new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    auto mark = Device::instance().record(stream.id());
    if (*event == nullptr) *event = new MarkPtr();
    *static_cast<MarkPtr*>(*event) = std::move(mark);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Device::instance().block(stream.id(), *static_cast<MarkPtr*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Device::instance().is_done(*static_cast<MarkPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Device::instance().synchronize(*static_cast<MarkPtr*>(event));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
  bool queryStream(const c10::Stream& stream) const override {
    return Device::instance().is_done(Device::instance().record(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Device::instance().synchronize(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { Device::instance().synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (memory.get() != nullptr) Device::instance().use(memory.get(), stream.id());
  }
};

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes == 0 ? nullptr : Device::instance().allocate(bytes, current);
    return {memory, memory, bytes == 0 ? &c10::detail::deleteNothing : &release, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Device::instance().push(current, [=] { std::memcpy(to, from, bytes); });
  }
  static void release(void* memory) { Device::instance().free(memory); }
};
Allocator allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
};

// ---- operations

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto meta = at::empty_strided(size, stride, at::TensorOptions().dtype(dtype).device(at::kMeta));
  const auto bytes = meta.storage().nbytes();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       allocator.allocate(bytes), &allocator, true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> where, std::optional<bool> pinned,
                 std::optional<at::MemoryFormat>) {
  std::vector<int64_t> stride(size.size(), 1);
  for (size_t i = size.size(); i > 1; --i) stride[i - 2] = stride[i - 1] * std::max<int64_t>(size[i - 1], 1);
  return empty_strided(size, stride, dtype, layout, where, pinned);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.is_cpu()) {
    Device::instance().synchronize(current);
    at::Tensor(to).copy_(on_host(from));
    return to;
  }
  const at::Tensor source = from.is_cpu() ? from.detach().clone() : on_host(from);
  launch([source, target = on_host(to)]() mutable { target.copy_(source); });
  return to;
}

void record_stream(at::Tensor& x, c10::Stream stream) {
  if (x.storage().data_ptr().get() != nullptr)
    Device::instance().use(x.storage().data_ptr().get(), stream.id());
}

bool is_here(const at::Tensor& x) { return x.defined() && x.device().type() == kType; }

// The argument with each tensor of this device as a CPU tensor of the same memory.
c10::IValue to_host(const c10::IValue& value) {
  if (value.isTensor()) return is_here(value.toTensor()) ? on_host(value.toTensor()) : value;
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector())
      list.push_back(is_here(each) ? on_host(each) : each);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector())
      list.push_back(each && is_here(*each) ? std::optional(on_host(*each)) : each);
    return list;
  }
  return value;
}

// A tensor of this device that gets the value of `x` on the current stream.
at::Tensor from_host(const at::Tensor& x) {
  auto out = empty_strided(x.sizes(), x.strides(), x.scalar_type(), {}, {}, {});
  launch([x, target = on_host(out)]() mutable { target.copy_(x); });
  return out;
}

c10::IValue to_device(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? from_host(value.toTensor()) : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& each : value.toTensorVector()) list.push_back(from_host(each));
  return list;
}

// Gives an empty tensor the memory and the shape of another one.
void become(const at::Tensor& empty, const at::Tensor& other) {
  auto* tensor = empty.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(other.storage());
  tensor->set_sizes_and_strides(other.sizes(), other.strides());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK(schema.name() != "aten::set_", "late: a tensor cannot get another storage");
  const auto given = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::Stack host;
  for (const auto& value : given) host.push_back(to_host(value));
  const auto run = [op](torch::jit::Stack& on_host) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &on_host);
  };
  torch::jit::drop(*stack, given.size());
  bool writes = false, resizes = false;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    writes = true;
    const bool is_empty_out = given[i].isTensor() && given[i].toTensor().numel() == 0 &&
                              schema.overload_name().find("out") != std::string::npos;
    if (!is_empty_out) continue;
    resizes = true;
    host[i] = at::empty({0}, given[i].toTensor().options().device(at::kCPU));
  }
  if (writes && !resizes) {
    launch([run, host]() mutable { run(host); });
  } else {
    Device::instance().synchronize(current);
    run(host);
  }
  if (!writes) {
    for (const auto& result : host) stack->push_back(to_device(result));
    return;
  }
  for (size_t number = 0; number < schema.returns().size(); ++number) {
    for (size_t i = 0; i < given.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      const auto* of_result = schema.returns()[number].alias_info();
      if (!alias || !of_result || *alias != *of_result) continue;
      if (resizes) become(given[i].toTensor(), from_host(host[number].toTensor()));
      stack->push_back(given[i]);
    }
  }
}

}  // namespace

StreamId current_stream() { return current; }

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_copy_from", &copy_from);
  library.impl("record_stream", &record_stream);
}

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static auto* hooks = new Hooks();
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(hooks);
  gossamer::register_device_kernels(kType, kernels());

  py::module_::import("torch.distributed");  // registers c10d::Backend with pybind11
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("size"))
      .def_property_readonly("options", [](const Backend&) { return py::none(); })
      .def_property_readonly("timeout", &Backend::timeout)
      .def_property_readonly("is_aborted", &Backend::is_aborted)
      .def_property_readonly("own_stream_calls", &Backend::own_stream_calls);
  module.def("shutdowns", [] { return Backend::shutdowns.load(); });
  const auto here = [] { return std::ref(Device::instance()); };
  module.def("set_late", [=](int which) { here().get().set_lateness(static_cast<Lateness>(which)); });
  module.def("drop_wait", [=](int number) { here().get().drop_wait(number); });
  module.def("waits", [=] { return here().get().waits(); });
  module.def("tasks", [=] { return here().get().tasks(); });
  module.def("drop_meeting", [](int number) {  // on every rank; numbers begin at 0 now
    dropped_meeting = number;
    return std::exchange(meetings, 0);
  });
  module.def("barriers", [] { return Backend::barriers.load(); });
  module.def("set_capturing", [](bool capturing) { is_capturing = capturing; });
  py::class_<Wired, Backend, c10::intrusive_ptr<Wired>>(module, "Wired")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>(), py::arg("wire"));
  module.def("die_in", [](int64_t operation) { Wired::last_begun = operation; });
  module.def("take_launches", &Backend::take_launches);
  module.def("set_worker_sleep", [](int milliseconds) { Backend::worker_sleep = milliseconds; });
  module.def("operations", [] { return Backend::operations.load(); });
  module.def("drop_records", [=](bool drop) { here().get().drop_records(drop); });
  module.def("fail_map_host", [](int count) { maps_until_failure = count; });
  module.def("mapped_host", [] { return mapped_host.size(); });
  module.def("settle", [=] { here().get().settle(); }, py::call_guard<py::gil_scoped_release>());
  module.def("synchronize", [=] { here().get().synchronize(); }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace late
