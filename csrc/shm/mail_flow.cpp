// How messages are offered, matched and moved; see mailbox.h. All functions run under the mailbox's lock, and none waits.
#include <algorithm>
#include <sstream>

#include "base/check.h"
#include "shm/mailbox.h"

namespace gossamer::shm {
namespace {

constexpr int64_t kWholeBytes = 4096;  // up to this size a message goes with its offer
constexpr int kWholeMessages = 32;     // of these without an answer, to one peer
constexpr int64_t kPartsInRing = 8;    // both sides copy at the same time

}  // namespace

// ---- incoming

// Reads what was there at the start, so that one busy peer does not delay the others.
bool Mailbox::drain(int index) {
  const Ring& ring = peers_[index].in;
  const uint64_t end = ring.written();
  if (ring.read() == end) return false;
  while (ring.read() != end) {
    const Frame frame = ring.front();
    handle(index, frame, ring);
    ring.pop(frame);
  }
  rouse(index);  // only once, so that a waiting writer finds much room
  return true;
}

void Mailbox::handle(int source, const Frame& frame, const Ring& ring) {
  switch (frame.kind) {
    case FrameKind::offer:
    case FrameKind::whole: return arrive(source, frame, ring);
    case FrameKind::part: return take_part(peers_[source], frame, ring);
    case FrameKind::cancel: return cancelled(source, frame.id);
    case FrameKind::grant:
      if (peers_[source].sends.count(frame.id)) peers_[source].granted.push_back(frame.id);
      return;
    case FrameKind::taken:
    case FrameKind::refuse:
    case FrameKind::stop: return answered(source, frame);
  }
  raise(ErrorKind::comm, "rank ", group_.global_rank(source), " has sent a frame of unknown kind ",
        static_cast<uint32_t>(frame.kind));
}

void Mailbox::arrive(int source, const Frame& frame, const Ring& ring) {
  const auto fits = [&](const auto& item) {
    return item.second.tag == frame.tag && (item.second.peer < 0 || item.second.peer == source);
  };
  const auto found = std::find_if(posted_.begin(), posted_.end(), fits);
  if (found == posted_.end()) {
    arrived_.push_back({source, frame, std::vector<uint8_t>(frame.payload)});
    ring.copy_payload(frame, arrived_.back().payload.data());
    return;
  }
  Operation receive = std::move(found->second);
  posted_.erase(found);
  pair(std::move(receive), source, frame, [&](void* into) { ring.copy_payload(frame, into); });
}

bool Mailbox::match_arrived(Operation& receive) {
  const auto found = std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrival& item) {
    return item.frame.tag == receive.tag && (receive.peer < 0 || receive.peer == item.source);
  });
  if (found == arrived_.end()) return false;
  pair(std::move(receive), found->source, found->frame, [&](void* into) {
    if (!found->payload.empty()) std::memcpy(into, found->payload.data(), found->payload.size());
  });
  const int source = found->source;
  arrived_.erase(found);
  if (peers_[source].gone.empty()) push(source);
  return true;
}

template <class Copy>
void Mailbox::pair(Operation receive, int source, const Frame& offer, const Copy& copy_to) {
  receive.peer = source;
  if (receive.bytes != offer.bytes) {
    answer(source, FrameKind::refuse, offer.id, receive.bytes);
    finish(receive, mismatch(source, group_.rank(), offer.tag, offer.bytes, receive.bytes));
  } else if (offer.kind == FrameKind::whole) {
    copy_to(receive.data);
    answer(source, FrameKind::taken, offer.id);
    finish(receive);
  } else {
    answer(source, FrameKind::grant, offer.id);
    peers_[source].receiving.emplace(offer.id, std::move(receive));
  }
}

void Mailbox::take_part(Peer& peer, const Frame& frame, const Ring& ring) {
  const auto found = peer.receiving.find(frame.id);
  if (found == peer.receiving.end()) return;  // the rest of an abandoned message
  Operation& receive = found->second;
  GOSSAMER_CHECK(frame.payload <= receive.bytes - receive.moved, ErrorKind::comm, describe(receive),
                 " has been sent ", receive.moved + frame.payload, " bytes");
  ring.copy_payload(frame, receive.data + receive.moved);
  receive.moved += frame.payload;
  if (receive.moved < receive.bytes) return;
  finish(receive);
  peer.receiving.erase(found);
}

void Mailbox::cancelled(int source, uint64_t id) {
  arrived_.remove_if([&](const Arrival& item) { return item.source == source && item.frame.id == id; });
  auto& receiving = peers_[source].receiving;
  const auto found = receiving.find(id);
  if (found == receiving.end()) return;
  std::ostringstream text;
  text << describe(found->second) << " failed: its send timed out, after " << found->second.moved << " bytes";
  finish(found->second, std::make_exception_ptr(Error(ErrorKind::comm, text.str())));
  receiving.erase(found);
}

void Mailbox::answered(int index, const Frame& frame) {
  auto& peer = peers_[index];
  const auto found = peer.sends.find(frame.id);
  if (found == peer.sends.end()) return;
  Operation& send = found->second;
  std::exception_ptr error;
  if (frame.kind == FrameKind::refuse) {
    error = mismatch(group_.rank(), index, send.tag, send.bytes, frame.bytes);
  } else if (frame.kind == FrameKind::stop) {
    std::ostringstream text;
    text << describe(send) << " failed: its receive timed out, after " << send.moved << " bytes";
    error = std::make_exception_ptr(Error(ErrorKind::comm, text.str()));
  }
  forget_send(peer, frame.id);
  finish(send, error);
  peer.sends.erase(found);
}

std::exception_ptr Mailbox::mismatch(int source, int target, uint64_t tag, int64_t sent,
                                     int64_t expected) const {
  std::ostringstream text;
  text << "a message from rank " << group_.global_rank(source) << " to rank " << group_.global_rank(target)
       << " (tag " << tag << ") must have one size on both sides, got a send of " << sent
       << " bytes and a receive of " << expected << " bytes";
  return std::make_exception_ptr(Error(ErrorKind::config, text.str()));
}

// ---- outgoing

void Mailbox::answer(int index, FrameKind kind, uint64_t id, int64_t bytes) {
  auto& peer = peers_[index];
  if (peer.gone.empty()) peer.answers.push_back({kind, 0, id, 0, bytes});
}

// Called before a send is erased.
void Mailbox::forget_send(Peer& peer, uint64_t id) {
  if (peer.sends.at(id).whole) --peer.whole_messages;
  peer.granted.erase(std::remove(peer.granted.begin(), peer.granted.end(), id), peer.granted.end());
}

// Writes as much as there is room for. The rest follows once the peer has read, which it signals by rouse().
bool Mailbox::push(int index) {
  bool moved = false;
  while (write_next(peers_[index])) {
    rouse(index);
    moved = true;
  }
  return moved;
}

// Returns false if nothing is left, or there is no room.
bool Mailbox::write_next(Peer& peer) {
  if (!peer.answers.empty()) {
    if (!peer.out.write(peer.answers.front(), nullptr)) return false;
    peer.answers.pop_front();
    return true;
  }
  const auto next = peer.sends.lower_bound(peer.next_offer);
  if (next != peer.sends.end()) {
    Operation& send = next->second;
    const bool whole = send.bytes <= kWholeBytes && peer.whole_messages < kWholeMessages;
    const Frame frame{whole ? FrameKind::whole : FrameKind::offer,
                      whole ? static_cast<uint32_t>(send.bytes) : 0, next->first, send.tag, send.bytes};
    if (!peer.out.write(frame, send.data)) return false;
    peer.next_offer = next->first + 1;
    send.whole = whole;
    peer.whole_messages += whole;
    return true;
  }
  if (peer.granted.empty()) return false;
  const auto found = peer.sends.find(peer.granted.front());
  Operation& send = found->second;
  const int64_t bytes = std::min(send.bytes - send.moved, ring_bytes(group_.size()) / kPartsInRing);
  const Frame frame{FrameKind::part, static_cast<uint32_t>(bytes), found->first, send.tag, send.bytes};
  if (!peer.out.write(frame, send.data + send.moved)) return false;
  send.moved += bytes;
  if (send.moved == send.bytes) {
    peer.granted.pop_front();
    finish(send);
    peer.sends.erase(found);
  }
  return true;
}

}  // namespace gossamer::shm
