// One table of codec, flat and optimizer kernels per device type, with the signatures of codec.h, flat.h and optim.h.
// device_kernels.cpp fills the CPU's table, with torch's threads where they pay. cuda.cu fills CUDA's, on the current stream.
// Torch-free, so that one library of CUDA kernels serves every torch. Other folders read the tables by device_kernels.h.
#pragma once

#include "codec/codec.h"
#include "flat/flat.h"
#include "optim/optim.h"

namespace gossamer {

struct DeviceKernels {
  void (*encode)(const codec::Spec&, Dtype source, const void* x, const codec::Rows&, uint8_t* wire);
  void (*decode)(const codec::Spec&, const codec::WireRows& wire, const codec::Rows&, void* out);
  void (*decode_add)(const codec::Spec&, const codec::WireRows& wire, int64_t rows, int64_t row_numel,
                     int64_t valid, void* acc);
  void (*reduce_encode)(const codec::Spec&, const codec::WireRows& wire, int64_t rows, int64_t row_numel,
                        int64_t valid, double scale, uint8_t* out, void* scratch);
  void (*encode_with_error)(const codec::Spec&, Dtype source, const void* x, void* error, const codec::Rows&,
                            uint8_t* wire);
  void (*reduce_encode_with_error)(const codec::Spec&, const codec::WireRows& wire, int64_t rows,
                                   int64_t row_numel, int64_t valid, double scale, uint8_t* out,
                                   void* scratch, void* error);
  void (*gather)(Dtype, const flat::Segment*, int64_t count, void* flat, double scale);
  void (*scatter)(Dtype, const flat::Segment*, int64_t count, const void* flat, double scale);
  void (*scale)(Dtype, void* flat, int64_t numel, double scale);
  void (*sum_rows)(Dtype, const flat::RowSum&, double scale);
  void (*meet)(const flat::Meeting&);  // null: the device's symmetric memory has a barrier of its own
  void* (*map_host)(void* memory, int64_t bytes);  // see flat/cuda.h; null on the CPU
  void (*unmap_host)(void* memory);
  void (*adam)(Dtype, const optim::Adam&, const optim::Segment*, int64_t count);
  void (*sgd)(Dtype, const optim::Sgd&, const optim::Segment*, int64_t count);
  bool (*is_capturing)();  // launches now go into a graph, and run later
};

// Where CUDA's kernels and the torch side find each other. A build from source has both in one library; wheels have the
// kernels in a library of their own, which is loaded before the torch side.
struct CudaHooks {
  const DeviceKernels* kernels = nullptr;  // set by cuda.cu when its library is loaded
  void* (*current_stream)() = nullptr;     // a cudaStream_t; set by device_kernels.cpp
};
CudaHooks& cuda_hooks();

}  // namespace gossamer
