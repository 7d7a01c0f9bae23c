// The shared memory of the mailboxes (mailbox.h): a ring of frames for every ordered pair of local ranks, written by one
// rank and read by the other. Zero-filled memory is an empty ring, so a rank may write before its peer has a mailbox. All
// counters lie together, so that looking for news touches no page of an unused ring.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "shm/pieces.h"

namespace gossamer::shm {

constexpr int64_t kFrameUnit = 32;  // bytes; frames begin at multiples of it, so a header never wraps

enum class FrameKind : uint32_t {
  offer = 1,  // I have a message of `bytes`
  whole,      // the same, and here it is
  part,       // the next bytes of a granted message
  cancel,     // I have withdrawn my message
  grant,      // send yours, there is a place for it
  taken,      // yours was received as a whole
  refuse,     // yours met a receive of `bytes`, which is another size
  stop,       // I have given up receiving yours
};

struct Frame {
  FrameKind kind;
  uint32_t payload;  // bytes that follow
  uint64_t id;       // of the message; unique for the pair and its direction
  uint64_t tag;
  int64_t bytes;
};
static_assert(sizeof(Frame) == kFrameUnit);

struct RingCounters {
  alignas(kLine) std::atomic<uint64_t> written;  // bytes so far, by the writer
  alignas(kLine) std::atomic<uint64_t> read;     // by the reader
};

inline int64_t ring_bytes(int size) { return size > 16 ? int64_t{64} << 10 : int64_t{256} << 10; }
inline int64_t counters_bytes(int size) {
  return (static_cast<int64_t>(sizeof(RingCounters)) * size * size + 4095) / 4096 * 4096;
}
inline int64_t mail_bytes(int size) { return counters_bytes(size) + ring_bytes(size) * size * size; }

// One side's view of a ring. The counters are stored sequentially consistent: a side that goes to sleep announces that
// first and then reads them; a side that changes them looks for sleepers afterwards.
class Ring {
 public:
  Ring(uint8_t* mail, int size, int from, int to)
      : counters_(reinterpret_cast<RingCounters*>(mail) + from * size + to),
        data_(mail + counters_bytes(size) + ring_bytes(size) * (from * size + to)),
        capacity_(static_cast<uint64_t>(ring_bytes(size))) {}
  // A ring in other memory than the mail area.
  Ring(RingCounters* counters, uint8_t* data, int64_t capacity)
      : counters_(counters), data_(data), capacity_(static_cast<uint64_t>(capacity)) {}

  uint64_t written() const { return counters_->written.load(); }
  uint64_t read() const { return counters_->read.load(); }

  // ---- for the writer
  bool write(const Frame& frame, const void* payload) const {  // false: no room
    const uint64_t at = counters_->written.load(std::memory_order_relaxed);
    const uint64_t used = at - counters_->read.load(std::memory_order_acquire);
    if (length(frame) > capacity_ - used) return false;
    std::memcpy(data_ + at % capacity_, &frame, sizeof(frame));
    if (payload) {
      const uint64_t start = (at + sizeof(frame)) % capacity_;
      const uint64_t first = std::min<uint64_t>(frame.payload, capacity_ - start);
      std::memcpy(data_ + start, payload, first);
      std::memcpy(data_, static_cast<const uint8_t*>(payload) + first, frame.payload - first);
    }
    counters_->written.store(at + length(frame));
    return true;
  }

  // ---- for the reader: the first frame, which must exist
  Frame front() const {
    Frame frame;
    std::memcpy(&frame, data_ + read() % capacity_, sizeof(frame));
    GOSSAMER_CHECK(length(frame) <= written() - read(), ErrorKind::comm, "a frame of ", frame.payload,
                   " bytes stands in a ring with ", written() - read(), "; its memory was overwritten");
    return frame;
  }
  void copy_payload(const Frame& frame, void* into) const {
    if (frame.payload == 0) return;
    const uint64_t start = (read() + sizeof(frame)) % capacity_;
    const uint64_t first = std::min<uint64_t>(frame.payload, capacity_ - start);
    std::memcpy(into, data_ + start, first);
    std::memcpy(static_cast<uint8_t*>(into) + first, data_, frame.payload - first);
  }
  void pop(const Frame& frame) const { counters_->read.store(read() + length(frame)); }

 private:
  static uint64_t length(const Frame& frame) {
    return sizeof(frame) + (uint64_t{frame.payload} + kFrameUnit - 1) / kFrameUnit * kFrameUnit;
  }

  RingCounters* counters_;
  uint8_t* data_;
  uint64_t capacity_;
};

}  // namespace gossamer::shm
