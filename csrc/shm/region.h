// The layout of the shared memory of a group's ranks on one host: a header, a slot for each rank, the mail area (mailbox.h)
// and the segments. Plain data and atomics only; group.h gives it meaning.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "shm/mail_layout.h"

namespace gossamer::shm {

constexpr int kMaxLocalRanks = 128;
#ifndef GOSSAMER_SEGMENT_KIB  // tests under sanitizers take smaller ones
#define GOSSAMER_SEGMENT_KIB 512
#endif
// Of one rank, for one round. Each rank has two.
constexpr int64_t kSegmentBytes = int64_t{GOSSAMER_SEGMENT_KIB} << 10;
constexpr size_t kReasonBytes = 512;

enum class Presence : uint32_t { joining = 0, present, left, failed, dead };

enum class CallKind : int32_t {
  refused = 0,
  all_reduce,
  broadcast,
  reduce,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  barrier,
  share,
  several,
};

// What a rank is about to do. Posted in the first round of every operation, and compared by all ranks.
struct Call {
  CallKind kind = CallKind::barrier;
  int32_t type = -1;  // shm::Type, or -1 where only bytes move
  int32_t op = -1;    // shm::Op, or -1
  int32_t root = -1;
  int64_t count = 0;      // elements (bytes if type is -1) of the part whose size is equal on all ranks
  int64_t symmetric = 0;  // which symmetric memory the tensor lies in, and where; 0: none
  int64_t offset = 0;
  double factor = 1;  // of premul_sum; the one field beside symmetric and offset that may differ
};

struct alignas(kLine) Slot {
  std::atomic<uint64_t> arrived;   // rounds this rank has entered
  std::atomic<uint32_t> presence;  // Presence
  std::atomic<int32_t> core;       // the core it was on when it entered the round
  std::atomic<uint32_t> doorbell;  // of its mailbox
  std::atomic<uint32_t> dozing;    // its mailbox thread sleeps on the doorbell
  int32_t process;                 // its process id, valid in process_space
  uint64_t process_space;
  int32_t rank;                              // in the whole group
  uint64_t proof;                            // the number from the meeting, see meet.cpp
  std::atomic<uint64_t> different;           // see Group::mark_different
  alignas(kLine) Call calls[2];              // by parity of the round
  alignas(kLine) char reason[kReasonBytes];  // why it has failed
  char refusals[2][kReasonBytes];            // why it refused its call; by parity of the round
};

struct alignas(kLine) Header {
  uint64_t proof;
  int32_t size;                                // local ranks
  int32_t cores;                               // that the local ranks may run on, all together
  alignas(kLine) std::atomic<uint32_t> count;  // ranks that have entered the round
  alignas(kLine) std::atomic<uint32_t> generation;
  alignas(kLine) std::atomic<uint32_t> sleepers;
};

// Offsets in bytes for `size` local ranks.
struct Layout {
  explicit Layout(int size)
      : size(size),
        mail(round_up(sizeof(Header) + sizeof(Slot) * size)),
        segments(round_up(mail + mail_bytes(size))),
        bytes(segments + kSegmentBytes * 2 * size) {}
  static constexpr int64_t round_up(int64_t value) { return (value + 4095) / 4096 * 4096; }

  int64_t slot(int local) const { return static_cast<int64_t>(sizeof(Header) + sizeof(Slot) * local); }
  int64_t segment(int local, int parity) const { return segments + kSegmentBytes * (2 * local + parity); }

  int size;
  int64_t mail, segments, bytes;
};

}  // namespace gossamer::shm
