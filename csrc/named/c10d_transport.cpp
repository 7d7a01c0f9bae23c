// See c10d_transport.h. The receiver must know the size of each packet, so a message is one packet of fixed size, and a
// second packet with the bytes that did not fit.
#include "named/c10d_transport.h"

#include <ATen/ops/empty.h>
#include <c10/util/thread_name.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace gossamer::named {
namespace {

using negotiate::Clock;

constexpr int64_t kPacketBytes = 1024;
constexpr int64_t kHeadBytes = 8;  // the message's length
constexpr int kPacketTag = 1;
constexpr int kRestTag = 2;
constexpr size_t kSendsInFlight = 64;

at::Tensor bytes(int64_t count) { return at::empty({count}, at::kByte); }

}  // namespace

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::Backend> backend, std::function<void()> lost)
    : backend_(std::move(backend)), lost_(std::move(lost)), owner_(getpid()) {
  const int peers = backend_->getRank() == 0 ? backend_->getSize() : std::min(backend_->getSize(), 1);
  for (int rank = 0; rank < peers; ++rank)
    if (rank != backend_->getRank()) readers_.push_back({rank, {}, {}});
  for (Reader& reader : readers_) reader.thread = std::thread([this, &reader] { run(reader); });
}

C10dTransport::~C10dTransport() {
  if (getpid() != owner_) {  // a forked child lacks the threads, and must not touch the connections
    for (Reader& reader : readers_) {
      reader.thread.detach();
      reader.receiving.release();
    }
    for (Sent& sent : sent_) sent.work.release();
    backend_.release();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    for (Reader& reader : readers_)
      if (reader.receiving) reader.receiving->abort();
  }
  for (Reader& reader : readers_) reader.thread.join();
  for (Sent& sent : sent_) {  // the memory is read until the send has ended
    try {
      sent.work->wait(std::chrono::seconds(1));
    } catch (const std::exception&) {
      sent.work->abort();
    }
  }
}

void C10dTransport::send(int to, const negotiate::Bytes& message) {
  const auto post = [&](const at::Tensor& memory, int tag) {
    std::vector<at::Tensor> tensors{memory};
    sent_.push_back({memory, backend_->send(tensors, to, tag)});
  };
  try {
    while (sent_.size() > kSendsInFlight) {  // ends soon: the peer always receives, or is lost
      sent_.front().work->wait();
      sent_.pop_front();
    }
    const auto length = static_cast<int64_t>(message.size());
    const int64_t first = std::min(length, kPacketBytes - kHeadBytes);
    const at::Tensor packet = bytes(kPacketBytes);
    auto* data = packet.data_ptr<uint8_t>();
    std::memcpy(data, &length, sizeof(length));
    std::memcpy(data + kHeadBytes, message.data(), first);
    post(packet, kPacketTag);
    if (first == length) return;
    const at::Tensor rest = bytes(length - first);
    std::memcpy(rest.data_ptr<uint8_t>(), message.data() + first, length - first);
    post(rest, kRestTag);
  } catch (const std::exception& error) {
    raise(ErrorKind::comm, "negotiate: rank ", to, " of the process set is lost: ", first_line(error.what()));
  }
}

void C10dTransport::wait(Reader& reader, at::Tensor memory, int tag) {
  std::vector<at::Tensor> tensors{std::move(memory)};
  Work work = backend_->recv(tensors, reader.from, tag);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reader.receiving = work;
    if (closing_) work->abort();
  }
  work->wait();
}

bool C10dTransport::next(Reader& reader, negotiate::Received& received) {
  const at::Tensor packet = bytes(kPacketBytes);
  received.from = reader.from;
  wait(reader, packet, kPacketTag);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return false;
  }
  const auto* data = packet.data_ptr<uint8_t>();
  int64_t length = 0;
  std::memcpy(&length, data, sizeof(length));
  GOSSAMER_CHECK(length >= 0, ErrorKind::comm, "negotiate: got a message of ", length, " bytes");
  const int64_t first = std::min(length, kPacketBytes - kHeadBytes);
  received.message.assign(data + kHeadBytes, data + kHeadBytes + first);
  if (first == length) return true;
  const at::Tensor rest = bytes(length - first);
  wait(reader, rest, kRestTag);
  const auto* more = rest.data_ptr<uint8_t>();
  received.message.insert(received.message.end(), more, more + (length - first));
  return true;
}

void C10dTransport::run(Reader& reader) {
  c10::setThreadName("gossamer-recv");
  try {
    negotiate::Received received;
    while (next(reader, received)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      mail_.push_back(std::move(received));
      news_.notify_one();
    }
  } catch (const std::exception& error) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_ || failure_) return;  // another reader has reported it
    failure_ = std::make_exception_ptr(
        Error(ErrorKind::comm, "negotiate: rank " + std::to_string(reader.from) +
                                   " of the process set is lost: " + first_line(error.what())));
    news_.notify_one();
    lock.unlock();
    lost_();
  }
}

bool C10dTransport::receive(negotiate::Received& received, Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (!mail_.empty()) {
      received = std::move(mail_.front());
      mail_.pop_front();
      return true;
    }
    if (failure_) std::rethrow_exception(failure_);
    if (std::exchange(woken_, false)) return false;
    if (deadline == Clock::time_point::min() || deadline <= Clock::now()) return false;
    news_.wait_until(lock, deadline);
  }
}

void C10dTransport::wake() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  woken_ = true;
  news_.notify_one();
}

}  // namespace gossamer::named
