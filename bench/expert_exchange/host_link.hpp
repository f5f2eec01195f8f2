// SPDX-License-Identifier: MIT
#pragma once

// What the link between a device and host memory gives to plain copies, which nothing cuts, packs
// or waits for: no exchange through host memory moves its records faster. The thread of main() owns
// it.

#include <bellows/engine/device.hpp>

#include <cstdint>
#include <string>

namespace bellows::bench {

class HostLink {
public:
    /// bytes: of each copy, rounded up to 64 KiB. device must outlive it.
    HostLink(Device& device, std::uint64_t bytes);

    std::uint64_t bytes() const { return bytes_; }
    void out();  ///< from the device to the host
    void in();   ///< from the host to the device
    void both(); ///< at once, other bytes each
    /// "" or what is wrong with what has been copied; runs both ways.
    std::string wrong();

private:
    Device& device_;
    std::uint64_t bytes_;
    Buffer from_, host_out_, host_in_, to_;
    Recording out_, in_;
};

} // namespace bellows::bench
