// SPDX-License-Identifier: MIT
#pragma once

// Vulkan instances of Bellows' own. Devices without validation share one, made on first use and
// kept until the process ends: drivers are loaded and unloaded with the last instance, some can be
// loaded only a few dozen times (each time costs them static thread-local storage), and making one
// takes tens of milliseconds. It holds nothing that a caller could see or change, so it is no state
// of the library; an adopted device does not touch it. Thread-safe.

#include "vulkan.hpp"

#include <memory>

namespace bellows::detail {

class Instance {
public:
    /// The process' instance. Throws Error{Unsupported} where there is no loader or driver; the
    /// next call then tries again.
    static std::shared_ptr<const Instance> shared();
    /// One of its own with the Khronos validation layer, whose messages thereby belong to one
    /// device. The shared one is made too, so that the drivers stay loaded.
    static std::shared_ptr<const Instance> with_validation();

    ~Instance();
    Instance(const Instance&) = delete;
    Instance& operator=(const Instance&) = delete;

    VkInstance handle() const noexcept { return handle_; }
    const volk::VolkInstanceTable& functions() const noexcept { return functions_; }

private:
    explicit Instance(bool validation);

    VkInstance handle_ = VK_NULL_HANDLE;
    volk::VolkInstanceTable functions_{};
};

} // namespace bellows::detail
