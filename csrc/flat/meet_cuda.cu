// meet of flat/cuda.h: one block with a thread for each rank. A thread stores the number of the meeting into its peer's
// memory, and reads its own until the peer has stored the same number there. There are only loads and stores, because GPUs
// that are joined by PCIe often have no atomic operations on each other's memory, as torch's own barrier needs. The number is
// kept on the device, so that a CUDA graph can hold the meeting.
#define GOSSAMER_ISA device
#include "base/cuda_launch.cuh"
#include "flat/cuda.h"

namespace gossamer::flat::cuda {
namespace {

constexpr unsigned kLooks = 1024;  // at a peer's arrival, for each look at the host's memory

struct Pads {
  uint32_t* of[kMostRanks];
};

// A rank's pad holds the number of the last meeting to which each rank has come, and then that of its own last meeting. A
// peer may be one meeting ahead, so numbers are compared by their difference.
__global__ void meet_all(Pads pads, int rank, int size, long long most_clocks, int* missing) {
  const volatile uint32_t* arrivals = pads.of[rank];
  volatile uint32_t* last = pads.of[rank] + kMostRanks;
  const uint32_t meeting = *last + 1;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < size) {
    __threadfence_system();  // with the store: a release of all that the stream has written
    *static_cast<volatile uint32_t*>(pads.of[peer] + rank) = meeting;
    const long long begin = clock64();
    for (unsigned look = 1; static_cast<int32_t>(arrivals[peer] - meeting) < 0; ++look) {
      if (look % kLooks == 0 && *static_cast<volatile int*>(missing) == kGivenUp) break;
      if (clock64() - begin < most_clocks) continue;
      *static_cast<volatile int*>(missing) = peer;
      __threadfence_system();
      __trap();
    }
    __threadfence_system();  // with the loads: an acquire
  }
  __syncthreads();
  if (peer == 0) *last = meeting;
}

}  // namespace

void meet(const Meeting& meeting, cudaStream_t stream) {
  GOSSAMER_CHECK(meeting.size <= kMostRanks, ErrorKind::config, "meet: at most ", kMostRanks, " ranks, got ",
                 meeting.size);
  int device = 0, clock_khz = 0;  // the highest clock: at a lower one the wait is longer
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device) == cudaSuccess;
  GOSSAMER_CHECK(known, ErrorKind::comm, "meet: the GPU's clock rate must be known, got ",
                 cudaGetErrorString(cudaGetLastError()));
  Pads pads{};
  for (int r = 0; r < meeting.size; ++r) pads.of[r] = meeting.pads[r];
  const auto threads = static_cast<unsigned>((meeting.size + 31) / 32 * 32);
  const long long most_clocks = meeting.timeout_ms * clock_khz;
  device::launch(meet_all, 1, threads, stream, pads, meeting.rank, meeting.size, most_clocks,
                 meeting.missing);
  device::check_launch("meet", ErrorKind::comm);
}

}  // namespace gossamer::flat::cuda
