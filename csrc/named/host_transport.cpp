// See host_transport.h.
#include "named/host_transport.h"

#include "errors.h"

namespace gossamer::named {
namespace {

using negotiate::Clock;

constexpr int64_t kBellBytes = 4096;
constexpr uint32_t kPartBytes = 16 << 10;  // of a message in one frame
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr auto kNear = std::chrono::milliseconds(1);
constexpr auto kLook = std::chrono::milliseconds(200);  // how often a sleeper looks after its peers
constexpr auto kFull = std::chrono::milliseconds(1);    // how soon a sleeper looks again after a full ring

int64_t memory_bytes(int size) {
  const auto counters = static_cast<int64_t>(sizeof(shm::RingCounters)) * size;
  return kBellBytes + (counters + 4095) / 4096 * 4096 + shm::ring_bytes(size) * size;
}

// The ring of `writer`, in the memory of the rank that reads it.
shm::Ring ring_of(void* base, int size, int writer) {
  auto* counters = static_cast<uint8_t*>(base) + kBellBytes;
  const auto all = (static_cast<int64_t>(sizeof(shm::RingCounters)) * size + 4095) / 4096 * 4096;
  return {reinterpret_cast<shm::RingCounters*>(counters) + writer,
          counters + all + shm::ring_bytes(size) * writer, shm::ring_bytes(size)};
}

}  // namespace

HostTransport::HostTransport(c10::intrusive_ptr<GossamerBackend> backend)
    : backend_(std::move(backend)), rank_(backend_->getRank()) {
  const int size = backend_->getSize();
  shared_ = backend_->share(std::make_shared<shm::Block>(memory_bytes(size)));
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank_ || (rank_ != 0 && peer != 0)) continue;
    const auto& bases = shared_->bases();
    peers_.emplace_back(
        peer, Peer{ring_of(bases[rank_], size, peer), ring_of(bases[peer], size, rank_), {}, 0, {}});
  }
}

HostTransport::~HostTransport() = default;

void HostTransport::ring(int rank) const {
  Bell& theirs = bell(rank);
  theirs.rung.fetch_add(1);
  if (theirs.dozing.load() != 0) shm::futex_wake_all(theirs.rung);
}

void HostTransport::wake() noexcept {
  woken_.store(true);
  ring(rank_);
}

void HostTransport::send(int to, const negotiate::Bytes& message) {
  Peer& peer = peers_[rank_ == 0 ? to - 1 : 0].second;
  peer.waiting.push_back(message);
  push(to, peer);
}

// Writes as much as fits; returns true if nothing is left.
bool HostTransport::push(int rank, Peer& peer) {
  bool wrote = false;
  while (!peer.waiting.empty()) {
    const negotiate::Bytes& message = peer.waiting.front();
    const auto left = message.size() - peer.written;
    const auto part = static_cast<uint32_t>(std::min<size_t>(left, kPartBytes));
    const auto kind = part == left ? shm::FrameKind::whole : shm::FrameKind::part;
    const shm::Frame frame{kind, part, 0, 0, static_cast<int64_t>(message.size())};
    if (!peer.out.write(frame, message.data() + peer.written)) break;
    wrote = true;
    peer.written += part;
    if (kind == shm::FrameKind::whole) {
      peer.waiting.pop_front();
      peer.written = 0;
    }
  }
  if (wrote) ring(rank);
  return peer.waiting.empty();
}

bool HostTransport::take(int rank, Peer& peer, negotiate::Received& received) {
  while (peer.in.written() != peer.in.read()) {
    const shm::Frame frame = peer.in.front();
    const size_t before = peer.partial.size();
    peer.partial.resize(before + frame.payload);
    peer.in.copy_payload(frame, peer.partial.data() + before);
    peer.in.pop(frame);
    if (frame.kind == shm::FrameKind::part) continue;
    received = {rank, std::exchange(peer.partial, {})};
    return true;
  }
  return false;
}

bool HostTransport::news() {
  if (woken_.load()) return true;
  for (const auto& [rank, peer] : peers_) {
    if (peer.in.written() != peer.in.read()) return true;
  }
  return false;
}

bool HostTransport::receive(negotiate::Received& received, Clock::time_point deadline) {
  while (true) {
    bool blocked = false;
    for (auto& [rank, peer] : peers_) blocked = !push(rank, peer) || blocked;
    for (size_t i = 0; i < peers_.size(); ++i) {
      auto& [rank, peer] = peers_[(next_ + i) % peers_.size()];
      if (!take(rank, peer, received)) continue;
      next_ = (next_ + i + 1) % peers_.size();
      return true;
    }
    if (woken_.exchange(false)) return false;
    if (deadline == Clock::time_point::min() || deadline <= Clock::now()) return false;
    doze(deadline, blocked);
  }
}

void HostTransport::doze(Clock::time_point until, bool blocked) {
  const auto begun = Clock::now();
  // Does not spin if `until` is near: that is the end of a window, and the submitting thread needs the core.
  for (auto now = begun; now - begun < kSpin && now + kNear < until; now = Clock::now()) {
    for (int i = 0; i < 20; ++i) {
      if (news()) return;
      shm::relax();
    }
  }
  Bell& mine = bell(rank_);
  const uint32_t seen = mine.rung.load();
  mine.dozing.store(1);
  if (!news()) {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now());
    const std::chrono::nanoseconds slice = blocked ? std::chrono::nanoseconds(kFull) : kLook;
    shm::futex_wait(mine.rung, seen, std::min(left, slice));
  }
  mine.dozing.store(0);
  if (mine.rung.load() == seen) require_peers();
}

// Callers come here only if nothing has arrived, so what a peer sent before its end is received first.
void HostTransport::require_peers() const {
  for (const auto& [rank, peer] : peers_) {
    const std::string trouble = backend_->trouble(rank);
    if (trouble.empty() || peer.in.written() != peer.in.read()) continue;
    throw Error(ErrorKind::comm, trouble);
  }
}

}  // namespace gossamer::named
