// See device_wait.h.
#include "comm/device_wait.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <thread>

namespace gossamer {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLookPeriod = std::chrono::milliseconds(200);
constexpr auto kSpin = std::chrono::milliseconds(1);  // how long the device is asked without a pause
constexpr auto kPause = std::chrono::microseconds(50);
constexpr auto kAbortTimeout = std::chrono::seconds(10);

}  // namespace

void wait_for_device(at::Device device, const DeviceWait& wait) {
  c10::Event end(device.type());
  end.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  wait_for_event(end, wait);
}

void wait_for_event(const c10::Event& end, const DeviceWait& wait) {
  const auto begin = Clock::now();
  auto next_look = begin + kLookPeriod;
  std::string why;
  while (why.empty() && !wait.failed && !end.query()) {
    const auto now = Clock::now();
    if (now > next_look) {
      why = wait.failure();
      next_look = now + kLookPeriod;
    }
    if (now - begin > wait.timeout)
      why = "it timed out after " + std::to_string(wait.timeout.count()) + " ms";
    now - begin < kSpin ? std::this_thread::yield() : std::this_thread::sleep_for(kPause);
  }
  // Whoever aborts says before that the group has failed.
  if (why.empty() && !wait.failed) return;
  if (why.empty()) why = wait.failure();
  wait.abort();
  const auto give_up = Clock::now() + kAbortTimeout;
  while (!end.query() && Clock::now() < give_up) std::this_thread::sleep_for(kPause);
  throw std::runtime_error(why.empty() ? "the group has failed" : why);
}

}  // namespace gossamer
