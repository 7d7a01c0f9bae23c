// Lets the host wait for a device whose work may wait for other ranks, of which one may be gone.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>

namespace gossamer {

struct DeviceWait {
  std::chrono::milliseconds timeout;
  const std::atomic<bool>& failed;       // set by any thread: the group has failed
  std::function<std::string()> failure;  // why the work will never end, or empty; asked five times a second
  std::function<void()> abort;           // lets the device go on without the other ranks
};

// Returns once the event has come. If the group has failed by then, or the time is over, it aborts, waits for the event all
// the same, and throws. What has been aborted leaves anything in its tensors.
void wait_for_event(const c10::Event& end, const DeviceWait& wait);
void wait_for_device(at::Device device, const DeviceWait& wait);  // what the current stream holds

}  // namespace gossamer
