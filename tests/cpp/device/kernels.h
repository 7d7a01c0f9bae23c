// The simulated device's table of kernels (device_kernels.h): each queues the CPU's kernel on the current stream. What a
// kernel is given by pointer on the host is copied, as a launch copies its arguments.
#pragma once

#include <vector>

#include "device_kernels.h"
#include "streams.h"

namespace late {

StreamId current_stream();  // of the calling thread

inline const gossamer::DeviceKernels& cpu() { return gossamer::device_kernels(c10::DeviceType::CPU); }

template <class Call>
void launch(Call call) {
  Device::instance().push(current_stream(), std::move(call));
}

// Rows of the wire whose addresses live as long as the launch.
class WireRows {
 public:
  WireRows(const gossamer::codec::WireRows& rows, int64_t count)
      : first_(rows.first),
        each_(rows.each ? std::vector<const uint8_t*>(rows.each, rows.each + count)
                        : std::vector<const uint8_t*>()) {}
  gossamer::codec::WireRows get() const {
    return first_ ? gossamer::codec::WireRows(first_) : gossamer::codec::WireRows(each_.data());
  }

 private:
  const uint8_t* first_;
  std::vector<const uint8_t*> each_;
};

inline gossamer::DeviceKernels kernels() {
  using namespace gossamer;
  DeviceKernels table{};
  table.encode = [](const codec::Spec& spec, Dtype source, const void* x, const codec::Rows& rows,
                    uint8_t* wire) { launch([=] { cpu().encode(spec, source, x, rows, wire); }); };
  table.decode = [](const codec::Spec& spec, const codec::WireRows& wire, const codec::Rows& rows,
                    void* out) {
    launch([=, wire = WireRows(wire, rows.rows)] { cpu().decode(spec, wire.get(), rows, out); });
  };
  table.decode_add = [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows, int64_t row_numel,
                        int64_t valid, void* acc) {
    launch([=, wire = WireRows(wire, rows)] {
      cpu().decode_add(spec, wire.get(), rows, row_numel, valid, acc);
    });
  };
  table.reduce_encode = [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows,
                           int64_t row_numel, int64_t valid, double scale, uint8_t* out, void* scratch) {
    launch([=, wire = WireRows(wire, rows)] {
      cpu().reduce_encode(spec, wire.get(), rows, row_numel, valid, scale, out, scratch);
    });
  };
  table.encode_with_error = [](const codec::Spec& spec, Dtype source, const void* x, void* error,
                               const codec::Rows& rows, uint8_t* wire) {
    launch([=] { cpu().encode_with_error(spec, source, x, error, rows, wire); });
  };
  table.reduce_encode_with_error = [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows,
                                      int64_t row_numel, int64_t valid, double scale, uint8_t* out,
                                      void* scratch, void* error) {
    launch([=, wire = WireRows(wire, rows)] {
      cpu().reduce_encode_with_error(spec, wire.get(), rows, row_numel, valid, scale, out, scratch, error);
    });
  };
  table.gather = [](Dtype dtype, const flat::Segment* segments, int64_t count, void* flat, double scale) {
    launch([=, all = std::vector<flat::Segment>(segments, segments + count)] {
      cpu().gather(dtype, all.data(), count, flat, scale);
    });
  };
  table.scatter = [](Dtype dtype, const flat::Segment* segments, int64_t count, const void* flat,
                     double scale) {
    launch([=, all = std::vector<flat::Segment>(segments, segments + count)] {
      cpu().scatter(dtype, all.data(), count, flat, scale);
    });
  };
  table.scale = [](Dtype dtype, void* flat, int64_t numel, double scale) {
    launch([=] { cpu().scale(dtype, flat, numel, scale); });
  };
  table.is_capturing = [] { return false; };
  return table;
}

}  // namespace late
