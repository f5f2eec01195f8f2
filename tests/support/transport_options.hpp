// SPDX-License-Identifier: MIT
#pragma once

#include <bellows/comm/message.hpp>
#include <bellows/engine/device.hpp>

namespace bellows::testing {

/// linked: for what goes from device to device where the ranks share a node.
inline TransportOptions transport_options(Device& device, bool linked) {
    TransportOptions options;
    options.device = linked ? &device : nullptr;
    options.device_link = device.info().is_cpu ? DeviceLinkKind::Host : DeviceLinkKind::Auto;
    return options;
}

} // namespace bellows::testing
