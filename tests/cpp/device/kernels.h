// The simulated device's table of kernels (device_kernels.h): each queues the CPU's kernel on the current stream. What a
// kernel is given by pointer on the host is copied, as a launch copies its arguments.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "device_kernels.h"
#include "streams.h"

namespace late {

StreamId current_stream();  // of the calling thread

inline const gossamer::DeviceKernels& cpu() { return gossamer::device_kernels(c10::DeviceType::CPU); }

// A meeting that ended in vain has stopped the device. Then nothing can be launched any more.
inline bool stopped = false;
inline void check_not_stopped() {
  if (stopped) throw std::runtime_error("late: the device has stopped");
}

template <class Call>
void launch(Call call) {
  check_not_stopped();
  Device::instance().push(current_stream(), std::move(call));
}

// As the kernels of a GPU, which read and write the wire in vectors.
inline void check_wire(const void* wire) {
  if (reinterpret_cast<uintptr_t>(wire) % 16 != 0)
    throw std::runtime_error("late: wire memory must be 16-byte aligned");
}

// Rows of the wire whose addresses live as long as the launch.
class WireRows {
 public:
  WireRows(const gossamer::codec::WireRows& rows, int64_t count)
      : first_(rows.first),
        each_(rows.each ? std::vector<const uint8_t*>(rows.each, rows.each + count)
                        : std::vector<const uint8_t*>()) {
    check_wire(first_);
    for (const uint8_t* row : each_) check_wire(row);
  }
  gossamer::codec::WireRows get() const {
    return first_ ? gossamer::codec::WireRows(first_) : gossamer::codec::WireRows(each_.data());
  }

 private:
  const uint8_t* first_;
  std::vector<const uint8_t*> each_;
};

// Meetings and memory as flat/cuda.h has them, where each rank is a process.
inline int meetings = 0, dropped_meeting = -1;  // a seeded fault: the meeting with this number is left out

inline void meet(const gossamer::flat::Meeting& given) {
  using namespace gossamer;
  check_not_stopped();
  if (meetings++ == dropped_meeting) return;
  struct Meeting {
    std::vector<uint32_t*> pads;
    flat::Meeting call;
    uint32_t number = 0;
    std::chrono::steady_clock::time_point deadline;
    static std::atomic<uint32_t>& word(uint32_t* at) { return *reinterpret_cast<std::atomic<uint32_t>*>(at); }
    // Told once, when the stream has come so far.
    void tell() {
      if (number != 0) return;
      number = pads[call.rank][flat::kMostRanks] + 1;
      deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(call.timeout_ms);
      for (uint32_t* pad : pads) word(pad + call.rank).store(number);
    }
    // Whether a peer has come.
    bool is_awaited() const {
      const uint32_t before = pads[call.rank][flat::kMostRanks];
      for (int peer = 0; peer < call.size; ++peer)
        if (static_cast<int32_t>(word(pads[call.rank] + peer).load() - before) > 0) return true;
      return false;
    }
    int missing() const {
      for (int peer = 0; peer < call.size; ++peer)
        if (static_cast<int32_t>(word(pads[call.rank] + peer).load() - number) < 0) return peer;
      return -1;
    }
  };
  auto meeting = std::make_shared<Meeting>();
  meeting->pads.assign(given.pads, given.pads + given.size);
  meeting->call = given;
  const auto given_up = [meeting] {
    return *static_cast<volatile int*>(meeting->call.missing) == flat::kGivenUp;
  };
  const auto ready = [meeting, given_up] {
    meeting->tell();
    return meeting->missing() < 0 || given_up() || std::chrono::steady_clock::now() > meeting->deadline;
  };
  const auto end = [meeting, given_up] {
    if (given_up()) return;
    meeting->pads[meeting->call.rank][flat::kMostRanks] = meeting->number;
    if (const int peer = meeting->missing(); peer >= 0) {
      *meeting->call.missing = peer;
      stopped = true;
      throw std::runtime_error("late: a meeting has stopped the device");
    }
  };
  Device::instance().push_when(current_stream(), ready, end, [meeting] { return meeting->is_awaited(); });
}

// Mappings of the host's memory by the host's address. Kernels see the memory at another address, and only until it is
// unmapped.
inline std::map<void*, std::pair<void*, int64_t>> mapped_host;
inline int maps_until_failure = -1;

inline bool is_capturing = false;

inline void* map_host(void* memory, int64_t bytes) {
  if (maps_until_failure-- == 0) throw std::runtime_error("late: map_host was told to fail");
  void* address =
      mremap(memory, 0, static_cast<size_t>(bytes), MREMAP_MAYMOVE);  // maps shared pages once more
  if (address == MAP_FAILED) throw std::runtime_error("late: the memory is not a shared mapping");
  mapped_host[memory] = {address, bytes};
  return address;
}

inline void unmap_host(void* memory) {
  const auto [address, bytes] = mapped_host.at(memory);
  munmap(address, static_cast<size_t>(bytes));
  mapped_host.erase(memory);
}

inline gossamer::DeviceKernels kernels() {
  using namespace gossamer;
  DeviceKernels table{};
  table.encode = [](const codec::Spec& spec, Dtype source, const void* x, const codec::Rows& rows,
                    uint8_t* wire) {
    check_wire(wire);
    launch([=] { cpu().encode(spec, source, x, rows, wire); });
  };
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
    check_wire(out);
    launch([=, wire = WireRows(wire, rows)] {
      cpu().reduce_encode(spec, wire.get(), rows, row_numel, valid, scale, out, scratch);
    });
  };
  table.encode_with_error = [](const codec::Spec& spec, Dtype source, const void* x, void* error,
                               const codec::Rows& rows, uint8_t* wire) {
    check_wire(wire);
    launch([=] { cpu().encode_with_error(spec, source, x, error, rows, wire); });
  };
  table.reduce_encode_with_error = [](const codec::Spec& spec, const codec::WireRows& wire, int64_t rows,
                                      int64_t row_numel, int64_t valid, double scale, uint8_t* out,
                                      void* scratch, void* error) {
    check_wire(out);
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
  table.sum_rows = [](Dtype dtype, const flat::RowSum& sum, double scale) {
    launch([=, rows = std::vector<const void*>(sum.rows, sum.rows + sum.count),
            outs = std::vector<void*>(sum.outs, sum.outs + sum.out_count)] {
      cpu().sum_rows(dtype, {rows.data(), sum.count, outs.data(), sum.out_count, sum.numel, sum.first},
                     scale);
    });
  };
  table.scale = [](Dtype dtype, void* flat, int64_t numel, double scale) {
    launch([=] { cpu().scale(dtype, flat, numel, scale); });
  };
  table.meet = meet;
  table.map_host = map_host;
  table.unmap_host = unmap_host;
  table.is_capturing = [] { return is_capturing; };
  return table;
}

}  // namespace late
