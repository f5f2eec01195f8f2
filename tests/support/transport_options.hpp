// SPDX-License-Identifier: MIT
#pragma once

#include <bellows/comm/message.hpp>
#include <bellows/engine/device.hpp>

#include <gtest/gtest.h>

#include <string>

namespace bellows::testing {

/// linked: for what goes from device to device where the ranks share a node.
inline TransportOptions transport_options(Device& device, bool linked) {
    TransportOptions options;
    options.device = linked ? &device : nullptr;
    options.device_link = device.info().is_cpu ? DeviceLinkKind::Host : DeviceLinkKind::Auto;
    return options;
}

/// Tests that run twice: with messages through the host's memory, and from device to device.
class OverEitherMemory : public ::testing::TestWithParam<bool> {
public:
    static bool linked() noexcept { return linked_; }
    static std::string name(const ::testing::TestParamInfo<bool>& one) {
        return one.param ? "OfDevices" : "OfTheHost";
    }

protected:
    void SetUp() override { linked_ = GetParam(); }

private:
    inline static bool linked_ = false;
};

} // namespace bellows::testing
