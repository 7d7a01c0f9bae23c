// The mailbox's thread, its sleep, deadlines and the loss of peers; see mailbox.h.
#include "shm/mailbox.h"

#include <pthread.h>

#include <algorithm>
#include <sstream>

#include "base/check.h"
#include "shm/futex.h"

namespace gossamer::shm {
namespace {

constexpr int kSpinsBetweenClocks = 16;
// A sleeper looks for a lost wake too, after kLook. This is how often it does both without pending operations.
constexpr auto kIdleLook = std::chrono::seconds(1);
// How long the destructor waits for room for the answers that peers still need to finish their sends.
constexpr auto kLinger = std::chrono::seconds(1);

std::exception_ptr comm_error(const std::string& message) {
  return std::make_exception_ptr(Error(ErrorKind::comm, message));
}

}  // namespace

Mailbox::Mailbox(Group& group) : group_(group) {
  const int size = group.size(), rank = group.rank();
  for (int peer = 0; peer < size; ++peer) {
    peers_.emplace_back(Ring(group.mail(), size, peer, rank), Ring(group.mail(), size, rank, peer));
  }
  thread_ = std::thread([this] { run(); });
}

Mailbox::~Mailbox() {
  closing_.store(true);
  nudge();
  thread_.join();
}

void Mailbox::send(int to, uint64_t tag, const void* data, int64_t bytes, Deadline deadline, Done done) {
  GOSSAMER_CHECK(to >= 0 && to < group_.size(), ErrorKind::config,
                 "send: the receiver must be one of the ranks 0 to ", group_.size() - 1,
                 " of this host, got ", to);
  GOSSAMER_CHECK(bytes >= 0 && (data || bytes == 0), ErrorKind::config, "send: needs a size and memory, got ",
                 bytes, " bytes at ", data);
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation operation{true,
                      to,
                      tag,
                      static_cast<uint8_t*>(const_cast<void*>(data)),
                      bytes,
                      deadline,
                      deadline - Clock::now(),
                      std::move(done)};
  ++open_;
  auto& peer = peers_[to];
  if (!peer.gone.empty()) {
    finish(operation, comm_error(describe(operation) + " failed: " + peer.gone));
  } else {
    peer.sends.emplace(peer.next_id++, std::move(operation));
    push(to);
  }
  posted(deadline);
}

void Mailbox::receive(int from, uint64_t tag, void* data, int64_t bytes, Deadline deadline, Done done) {
  GOSSAMER_CHECK(from >= -1 && from < group_.size(), ErrorKind::config,
                 "receive: the sender must be one of the ranks 0 to ", group_.size() - 1,
                 " of this host or -1 for any, got ", from);
  GOSSAMER_CHECK(bytes >= 0 && (data || bytes == 0), ErrorKind::config,
                 "receive: needs a size and memory, got ", bytes, " bytes at ", data);
  const std::lock_guard<std::mutex> lock(mutex_);
  Operation operation{
      false,          from, tag, static_cast<uint8_t*>(data), bytes, deadline, deadline - Clock::now(),
      std::move(done)};
  ++open_;
  if (!match_arrived(operation)) {
    const std::string& why = from < 0 ? any_gone_ : peers_[from].gone;
    if (!why.empty()) {
      finish(operation, comm_error(describe(operation) + " failed: " + why));
    } else {
      posted_.emplace(next_receive_++, std::move(operation));
    }
  }
  posted(deadline);
}

// The caller has moved what could be moved, so the thread is woken only for other work.
void Mailbox::posted(Deadline deadline) {
  next_deadline_ = std::min(next_deadline_, deadline);
  if (!finished_.empty() || deadline < wake_at_) nudge();
}

void Mailbox::run() {
  pthread_setname_np(pthread_self(), "gossamer-mail");
  while (!closing_.load()) {
    const uint64_t seen = signs();
    if (pass()) continue;
    if (group_.may_spin() && spin(seen)) continue;
    doze(seen);
  }
  close();
}

// Does all work there is. Returns false if there was none.
bool Mailbox::pass() {
  bool moved = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::string trouble = own_trouble();
    for (int index = 0; index < group_.size(); ++index) moved |= serve(index, trouble);
    const auto now = Clock::now();
    if (now >= next_deadline_) expire(now);
    wake_at_ = std::min<Deadline>(next_deadline_, now + (open_ > 0 ? Clock::duration(kLook) : kIdleLook));
  }
  return deliver() || moved;
}

bool Mailbox::serve(int index, const std::string& own_trouble) {
  if (!peers_[index].gone.empty()) return false;
  // Read before the ring is drained: what the peer wrote before its end counts.
  std::string why = own_trouble.empty() ? group_.trouble(index) : own_trouble;
  bool moved = false;
  try {
    moved = drain(index);
  } catch (const std::exception& error) {
    why = error.what();
  }
  moved |= push(index);
  if (!why.empty()) bury(index, why);
  return moved;
}

std::string Mailbox::own_trouble() const { return group_.trouble(group_.rank()); }

bool Mailbox::deliver() {
  std::vector<Finished> finished;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished.swap(finished_);
  }
  for (auto& item : finished) item.done(item.source, item.error);
  return !finished.empty();
}

void Mailbox::close() {
  const auto until = Clock::now() + kLinger;
  bool answers = true;
  while (answers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      answers = false;
      for (int index = 0; index < group_.size(); ++index) {
        if (peers_[index].gone.empty()) bury(index, "the group was closed");
        push(index);
        answers |= !peers_[index].answers.empty() && group_.trouble(index).empty() && Clock::now() < until;
      }
    }
    while (deliver()) {
    }
    if (answers) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// ---- sleep

// A sum of counters that only grow: it changes when there is something to do. Takes no lock.
uint64_t Mailbox::signs() const {
  uint64_t sum = group_.slot(group_.rank()).doorbell.load();
  for (const auto& peer : peers_) sum += peer.in.written() + peer.out.read();
  return sum;
}

bool Mailbox::spin(uint64_t seen) const {
  const auto until = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kSpinsBetweenClocks; ++i) {
      if (signs() != seen) return true;
      relax();
    }
    std::this_thread::yield();  // the scheduler often puts the thread that would bring news on this core
  } while (Clock::now() < until);
  return false;
}

void Mailbox::doze(uint64_t seen) {
  auto& own = group_.slot(group_.rank());
  const uint32_t bell = own.doorbell.load();
  own.dozing.store(1);
  if (signs() == seen) futex_wait(own.doorbell, bell, wake_at_ - Clock::now());
  own.dozing.store(0);
}

// Makes this mailbox's thread look at something that is not in a ring.
void Mailbox::nudge() {
  auto& own = group_.slot(group_.rank());
  own.doorbell.fetch_add(1);
  if (own.dozing.exchange(0)) futex_wake_all(own.doorbell);
}

// To be called after writing into a ring for a peer, or reading from one of the peer's.
void Mailbox::rouse(int index) {
  auto& slot = group_.slot(index);
  if (!slot.dozing.load() || !slot.dozing.exchange(0)) return;
  slot.doorbell.fetch_add(1);
  futex_wake_all(slot.doorbell);
}

// ---- the loss of peers

void Mailbox::bury(int index, const std::string& why) {
  auto& peer = peers_[index];
  peer.gone = why;
  const auto all = [](const Operation&) { return true; };
  fail(peer.sends, why, all);
  fail(peer.receiving, why, all);
  peer.granted.clear();
  arrived_.remove_if(
      [&](const Arrival& item) { return item.source == index && item.frame.kind == FrameKind::offer; });

  // A rank that has left owes nothing to a receive from any source, unless no other rank is left.
  const bool left = static_cast<Presence>(group_.slot(index).presence.load()) == Presence::left;
  bool others = false;
  for (int other = 0; other < group_.size(); ++other) {
    others |= other != group_.rank() && peers_[other].gone.empty();
  }
  if (any_gone_.empty() && !left) any_gone_ = why;
  if (any_gone_.empty() && !others) any_gone_ = "every other rank has left the group";
  fail(posted_, why, [&](const Operation& receive) { return receive.peer == index; });
  if (!any_gone_.empty()) fail(posted_, any_gone_, [](const Operation& receive) { return receive.peer < 0; });
}

void Mailbox::fail(Operations& operations, const std::string& why,
                   const std::function<bool(const Operation&)>& which) {
  for (auto item = operations.begin(); item != operations.end();) {
    if (!which(item->second)) {
      ++item;
      continue;
    }
    finish(item->second, comm_error(describe(item->second) + " failed: " + why));
    item = operations.erase(item);
  }
}

void Mailbox::expire(Deadline now) {
  next_deadline_ = Deadline::max();
  for (int index = 0; index < group_.size(); ++index) {
    auto& peer = peers_[index];
    expire(peer.sends, now, [&](uint64_t id) {
      forget_send(peer, id);
      if (id < peer.next_offer) answer(index, FrameKind::cancel, id);
    });
    expire(peer.receiving, now, [&](uint64_t id) { answer(index, FrameKind::stop, id); });
    if (peer.gone.empty()) push(index);
  }
  expire(posted_, now, [](uint64_t) {});
}

void Mailbox::expire(Operations& operations, Deadline now, const std::function<void(uint64_t)>& withdraw) {
  for (auto item = operations.begin(); item != operations.end();) {
    auto& [id, operation] = *item;
    if (operation.deadline > now) {
      next_deadline_ = std::min(next_deadline_, operation.deadline);
      ++item;
      continue;
    }
    std::ostringstream text;
    const auto allowed = std::chrono::round<std::chrono::milliseconds>(operation.allowed);
    text << describe(operation) << ": Timed out after " << static_cast<double>(allowed.count()) / 1000
         << " s; ";
    if (operation.moved > 0) {
      text << operation.moved << " bytes of it had been moved";
    } else if (operation.sends) {
      text << "no receive has taken it";
    } else {
      text << "no such message has come; " << arrived_.size() << " others wait for a receive";
    }
    finish(operation, comm_error(text.str()));
    withdraw(id);
    item = operations.erase(item);
  }
}

void Mailbox::finish(Operation& operation, std::exception_ptr error) {
  --open_;
  finished_.push_back({std::move(operation.done), operation.peer, std::move(error)});
}

std::string Mailbox::describe(const Operation& operation) const {
  std::ostringstream text;
  text << (operation.sends ? "send of " : "receive of ") << operation.bytes << " bytes "
       << (operation.sends ? "to " : "from ");
  if (operation.peer < 0) {
    text << "any rank";
  } else {
    text << "rank " << group_.global_rank(operation.peer);
  }
  text << " (tag " << operation.tag << ")";
  return text.str();
}

}  // namespace gossamer::shm
