// SPDX-License-Identifier: MIT
#pragma once

// Messages in the trace: one event each, from its posting to its end, on a lane per direction and
// peer. For whoever polls transfers, on its thread.

#include <bellows/comm/message.hpp>
#include <bellows/engine/device.hpp>

#include <string>

namespace bellows {

/// Once per message, when it is done. `owner`: the exchange, collective or pipe that it belongs to.
inline void trace_transfer(Device& device, const std::string& owner, const Transfer& transfer) {
    if (!device.options().trace)
        return;
    const auto ns = [](std::chrono::steady_clock::time_point time) {
        return time.time_since_epoch() / std::chrono::nanoseconds(1);
    };
    const bool sends = transfer.direction() == Direction::Send;
    device.add_to_trace(
        {owner + (sends ? " messages to " : " messages from ") + std::to_string(transfer.peer()),
         (sends ? "send " : "receive ") + std::to_string(transfer.expected_bytes()) + " bytes",
         owner, ns(transfer.posted()), ns(std::chrono::steady_clock::now())});
}

/// Whether the message is done; traced when it is found to be. Throws as Transfer::test().
inline bool test_and_trace(Device& device, const std::string& owner, Transfer& transfer) {
    if (transfer.done())
        return true;
    if (!transfer.test())
        return false;
    trace_transfer(device, owner, transfer);
    return true;
}

} // namespace bellows
