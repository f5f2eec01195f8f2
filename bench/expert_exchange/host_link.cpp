// SPDX-License-Identifier: MIT
#include "expert_exchange/host_link.hpp"

#include "support/peaks.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/time_point.hpp>

#include <algorithm>

namespace bellows::bench {

namespace {

constexpr std::uint64_t kStep = std::uint64_t{64} << 10;
constexpr std::uint32_t kSeed = 0x5eed;

} // namespace

HostLink::HostLink(Device& device, std::uint64_t bytes)
    : device_(device), bytes_((std::max(bytes, kStep) + kStep - 1) / kStep * kStep),
      from_(device, {.name = "from", .bytes = bytes_}),
      host_out_(device, {.name = "host out", .bytes = bytes_, .kind = MemoryKind::Readback}),
      host_in_(device, {.name = "host in", .bytes = bytes_, .kind = MemoryKind::Readback}),
      to_(device, {.name = "to", .bytes = bytes_}),
      out_(device, QueueRole::TransferOut, "host link out"),
      in_(device, QueueRole::TransferIn, "host link in") {
    out_.copy(from_.view(), host_out_.view());
    in_.copy(host_in_.view(), to_.view());
    write_pattern(device, from_.view(), kSeed);
}

void HostLink::out() {
    device_.submit(out_).wait();
}

void HostLink::in() {
    device_.submit(in_).wait();
}

void HostLink::both() {
    const TimePoint sent = device_.submit(out_);
    device_.submit(in_).wait();
    sent.wait();
}

std::string HostLink::wrong() {
    out();
    std::ranges::copy(host_out_.mapped_as<const std::uint32_t>(),
                      host_in_.mapped_as<std::uint32_t>().begin());
    in();
    try {
        expect_pattern(device_, to_.view(), kSeed);
    } catch (const Error& error) {
        return error.message();
    }
    return "";
}

} // namespace bellows::bench
