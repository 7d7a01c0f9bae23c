// The round and its barrier; see group.h.
#include "shm/group.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <thread>

#include "base/check.h"
#include "shm/reduce.h"
#include "shm/watch.h"

namespace gossamer::shm {
namespace {

constexpr int kSpinsBetweenYields = 200;
// With more ranks than cores, a waiting rank gives its core to the next one a few times before it sleeps.
constexpr int kYieldsBeforeSleep = 4;

double seconds(Clock::duration duration) {
  return static_cast<double>(std::chrono::round<std::chrono::milliseconds>(duration).count()) / 1000;
}

// Process ids have the same meaning for all processes of one space.
uint64_t process_space() {
  struct stat space{};
  return stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0;
}

const char* name(CallKind kind) {
  switch (kind) {
    case CallKind::refused: return "a refused call";
    case CallKind::all_reduce: return "all_reduce";
    case CallKind::broadcast: return "broadcast";
    case CallKind::reduce: return "reduce";
    case CallKind::all_gather: return "all_gather";
    case CallKind::gather: return "gather";
    case CallKind::scatter: return "scatter";
    case CallKind::reduce_scatter: return "reduce_scatter";
    case CallKind::all_to_all: return "all_to_all";
    case CallKind::barrier: return "barrier";
    case CallKind::several: return "several operations";
    case CallKind::share: return "sharing of memory";
  }
  return "an unknown call";
}

}  // namespace

bool alike(const Call& a, const Call& b) {
  return a.kind == b.kind && a.type == b.type && a.op == b.op && a.root == b.root && a.count == b.count;
}

std::string describe(const Call& call) {
  std::ostringstream text;
  text << name(call.kind);
  if (call.kind == CallKind::barrier || call.kind == CallKind::refused) return text.str();
  if (call.kind == CallKind::several) {
    text << ", " << call.count << " in all";
    return text.str();
  }
  text << " of " << call.count << " " << (call.type < 0 ? "bytes" : name(static_cast<Type>(call.type)));
  if (call.op >= 0) text << " (" << name(static_cast<Op>(call.op)) << ")";
  if (call.root >= 0) text << ", root " << call.root;
  return text.str();
}

std::string describe_difference(const Call& one, int rank_of_one, const Call& two, int rank_of_two) {
  std::ostringstream text;
  text << "every rank must make the same call, got " << describe(one) << " on rank " << rank_of_one << " and "
       << describe(two) << " on rank " << rank_of_two;
  return text.str();
}

Group::Group(Meeting meeting)
    : region_(std::move(meeting.region)),
      layout_(static_cast<int>(meeting.hosts[meeting.host].size())),
      rank_(meeting.local),
      hosts_(std::move(meeting.hosts)),
      host_(meeting.host),
      sockets_(std::move(meeting.sockets)),
      spin_(header().cores >= layout_.size) {
  slot(rank_).process = getpid();
  slot(rank_).process_space = process_space();
  set_presence(rank_, Presence::present);
  try {
    for (size_t place = 0; place < sockets_.size(); ++place) {
      if (!sockets_[place]) continue;
      const int peer = rank_ == 0 ? static_cast<int>(place) : 0;
      watches_.push_back(Watch::of_this_process().add(sockets_[place], [this, peer] {
        const auto was = static_cast<Presence>(slot(peer).presence.load());
        if (was == Presence::joining || was == Presence::present) set_presence(peer, Presence::dead);
      }));
    }
  } catch (...) {
    unwatch();  // the destructor will not run
    throw;
  }
}

Group::~Group() {
  unwatch();
  leave();
}

void Group::unwatch() {
  for (const uint64_t watch : watches_) Watch::of_this_process().remove(watch);
}

void Group::leave() {
  if (static_cast<Presence>(slot(rank_).presence.load()) != Presence::present) return;
  set_presence(rank_, Presence::left);
}

void Group::set_presence(int local, Presence presence) {
  slot(local).presence.store(static_cast<uint32_t>(presence));
  futex_wake_all(header().generation);
  for (int peer = 0; peer < size(); ++peer) {
    slot(peer).doorbell.fetch_add(1);
    futex_wake_all(slot(peer).doorbell);
  }
}

void Group::begin(const Call& call, Deadline deadline) {
  if (broken_.empty() && aborted()) broken_ = trouble(rank_);
  GOSSAMER_CHECK(broken_.empty(), ErrorKind::comm, "the group cannot be used any more: ", broken_);
  call_ = call;
  allowed_ = deadline - Clock::now();
  deadline_ = deadline;
  slot(rank_).calls[round_ & 1] = call;
}

void Group::meet() {
  auto& head = header();
  const uint32_t generation = head.generation.load(std::memory_order_acquire);
  ++round_;
  slot(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
  slot(rank_).arrived.store(round_, std::memory_order_release);
  if (head.count.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size())) {
    head.count.store(0, std::memory_order_relaxed);
    head.generation.store(generation + 1);  // sequentially consistent, like the read of sleepers
    if (head.sleepers.load() > 0) futex_wake_all(head.generation);
    return;
  }
  if (spin_) {
    const auto until = Clock::now() + kSpin;
    do {
      for (int i = 0; i < kSpinsBetweenYields; ++i) {
        if (head.generation.load(std::memory_order_acquire) != generation) return;
        relax();
      }
      std::this_thread::yield();  // the peer may be waiting for this core
    } while (Clock::now() < until && !needed_core());
  }
  for (int turn = 0; !spin_ && turn < kYieldsBeforeSleep; ++turn) {
    std::this_thread::yield();
    if (head.generation.load(std::memory_order_acquire) != generation) return;
  }
  while (!wait_for(generation)) check_peers(generation);
}

// Whether a rank that has not come was last seen on the core on which this rank spins. The scheduler may leave two ranks on
// one core for long beside an idle core, and a yield does not always hand the core over.
bool Group::needed_core() const {
  const int core = sched_getcpu();
  for (int peer = 0; peer < size(); ++peer) {
    const Slot& other = slot(peer);
    if (other.arrived.load(std::memory_order_relaxed) < round_ &&
        other.core.load(std::memory_order_relaxed) == core)
      return true;
  }
  return false;
}

// Sleeps until the round ends. Returns false if it is time to look at the peers.
bool Group::wait_for(uint32_t generation) {
  auto& head = header();
  head.sleepers.fetch_add(1);
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline_ - Clock::now());
  if (head.generation.load() == generation && !aborted()) {
    futex_wait(head.generation, generation, std::min<std::chrono::nanoseconds>(kLook, left));
  }
  head.sleepers.fetch_sub(1);
  return head.generation.load(std::memory_order_acquire) != generation;
}

// Checks ranks that have entered this round too: one that was killed afterwards may have been about to end the round.
void Group::check_peers(uint32_t generation) {
  const auto ended = [&] { return header().generation.load(std::memory_order_acquire) != generation; };
  for (int peer = 0; peer < size(); ++peer) {
    const std::string why = trouble(peer);
    // A rank that has left did so after its last round. That may be this round, which then ends as it should.
    if (!why.empty() && !ended()) break_with(why, why);
  }
  if (Clock::now() < deadline_) return;
  const std::string silent = missing();
  if (ended()) return;
  std::ostringstream text, told;
  text << "Timed out after " << seconds(allowed_) << " s; silent: " << silent;
  told << silent << " did not come within " << seconds(allowed_) << " s";
  break_with(text.str(), told.str());
}

// The first rank of a host watches the others, and they watch it. Once it is gone the others check each other's processes
// themselves, if they can see them.
bool Group::has_ended(int peer) const {
  const auto leader = static_cast<Presence>(slot(0).presence.load());
  if (leader == Presence::joining || leader == Presence::present) return false;
  if (slot(peer).process_space != process_space()) return false;
  const Fd process(static_cast<int>(syscall(SYS_pidfd_open, slot(peer).process, 0)));
  if (!process) return errno == ESRCH;
  pollfd item{process.get(), POLLIN, 0};
  return ::poll(&item, 1, 0) == 1;
}

std::string Group::trouble(int peer) const {
  if (aborted()) {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    return abort_reason_;
  }
  const std::string who = "rank " + std::to_string(global_rank(peer));
  switch (static_cast<Presence>(slot(peer).presence.load())) {
    case Presence::dead: return who + " has ended without a word (killed, or crashed)";
    case Presence::left: return who + " has left the group";
    case Presence::failed: {  // its reason may be another rank's failure; then report that
      const std::string reason = slot(peer).reason;
      return reason.compare(0, 5, "rank ") == 0 ? reason : who + " has failed: " + reason;
    }
    case Presence::joining: break;  // it may still be writing which process it is
    case Presence::present:
      if (has_ended(peer)) return who + " has ended without a word (killed, or crashed)";
  }
  return {};
}

bool Group::has_failed() const {
  for (int peer = 0; peer < size(); ++peer) {
    const bool left = static_cast<Presence>(slot(peer).presence.load()) == Presence::left;
    if (!left && !trouble(peer).empty()) return true;
  }
  return aborted();
}

std::string Group::missing() const {
  std::string text;
  for (int peer = 0; peer < size(); ++peer) {
    if (slot(peer).arrived.load(std::memory_order_acquire) >= round_) continue;
    text += (text.empty() ? "rank " : ", ") + std::to_string(global_rank(peer));
  }
  return text.empty() ? "none" : text;
}

void Group::break_with(const std::string& reason, const std::string& told) {
  broken_ = describe(call_) + " on rank " + std::to_string(global_rank(rank_)) + ": " + reason;
  fail(told);
  throw Error(ErrorKind::comm, broken_);
}

void Group::compare() {
  for (int peer = 0; peer < size(); ++peer) {
    if (call_of(peer).kind != CallKind::refused) continue;
    raise(ErrorKind::config, describe(call_), ": rank ", global_rank(peer),
          " refused its call: ", slot(peer).refusals[(round_ + 1) & 1]);
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (alike(call_of(peer), call_of(0))) continue;
    throw Error(ErrorKind::config,
                describe_difference(call_of(0), global_rank(0), call_of(peer), global_rank(peer)));
  }
}

void Group::refuse(const std::string& reason, Deadline deadline) {
  Call call;
  call.kind = CallKind::refused;
  begin(call, deadline);
  auto& text = slot(rank_).refusals[round_ & 1];
  text[reason.copy(text, kReasonBytes - 1)] = 0;
  meet();
}

std::vector<Fd> Group::share(int fd, int64_t bytes, Deadline deadline) {
  Call call;
  call.kind = CallKind::share;
  call.count = bytes;
  begin(call, deadline);
  meet();
  compare();
  const auto who = [this](int peer) { return "rank " + std::to_string(global_rank(peer)); };
  const auto from = [&](int peer, size_t count) {
    const Socket& socket = sockets_[rank_ == 0 ? peer : 0];
    while (!socket.readable(std::min(deadline, Clock::now() + kLook)) && Clock::now() < deadline) {
      const std::string why = trouble(peer);
      // Bytes that it wrote before it left still count.
      GOSSAMER_CHECK(why.empty() || socket.readable(Clock::now()), ErrorKind::comm, why);
    }
    char word = 0;
    return socket.receive(&word, 1, count, deadline, who(peer));
  };
  try {
    const char word = 0;
    if (rank_ != 0) {
      sockets_[0].send(&word, 1, {fd}, deadline, who(0));
      return from(0, static_cast<size_t>(size()));
    }
    std::vector<Fd> fds;
    fds.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    for (int peer = 1; peer < size(); ++peer) fds.push_back(std::move(from(peer, 1)[0]));
    std::vector<int> numbers;
    for (const auto& each : fds) numbers.push_back(each.get());
    for (int peer = 1; peer < size(); ++peer) sockets_[peer].send(&word, 1, numbers, deadline, who(peer));
    return fds;
  } catch (const Error& error) {
    break_with(error.what(), error.what());
  }
}

void Group::abort(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    if (aborted()) return;
    abort_reason_ = reason;
    aborted_.store(true);
  }
  fail(reason);
}

// The first reason stays: other ranks may be reading it.
void Group::fail(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(reason_mutex_);
  auto& own = slot(rank_);
  if (static_cast<Presence>(own.presence.load()) != Presence::present) return;
  own.reason[reason.copy(own.reason, kReasonBytes - 1)] = 0;
  set_presence(rank_, Presence::failed);
}

}  // namespace gossamer::shm
