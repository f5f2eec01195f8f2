// SPDX-License-Identifier: MIT
#pragma once

// The device that tests run on: the environment's choice (BELLOWS_DEVICE, VK_DRIVER_FILES), with
// the happens-before checker on and released memory poisoned. A machine without one fails the
// test: nothing skips silently.

#include <bellows/engine/device.hpp>

#include <memory>

namespace bellows::testing {

inline DeviceOptions test_options() {
    DeviceOptions options;
    options.check_happens_before = true;
    options.poison_freed_memory = true;
    return DeviceOptions::from_environment(options);
}

inline std::unique_ptr<Device> make_device(const DeviceOptions& options = test_options()) {
    return Device::create(options);
}

template <class T>
std::vector<T> read_back(Device& device, BufferView view) {
    std::vector<T> values(view.bytes / sizeof(T));
    device.download(view, std::span<T>(values));
    return values;
}

} // namespace bellows::testing
