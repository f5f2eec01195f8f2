// SPDX-License-Identifier: MIT
#include <bellows/run/devices.hpp>

#include <bellows/comm/host_collectives.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <map>
#include <ranges>
#include <span>
#include <sstream>
#include <unistd.h>

namespace bellows {

namespace {

std::uint64_t available_memory(const Device& device) {
    const MemoryReport report = device.memory_report();
    if (!device.info().is_cpu)
        return report.budget_bytes;
    std::ifstream meminfo("/proc/meminfo");
    for (std::string key, rest; meminfo >> key && std::getline(meminfo, rest);)
        if (key == "MemAvailable:")
            return std::strtoull(rest.c_str(), nullptr, 10) * 1024;
    return report.budget_bytes;
}

/// Of the memory that the device's ranks share: a CPU device has the host's.
std::string memory_key(const DeviceInfo& info) {
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    return std::string(host.data()) + " " + (info.is_cpu ? "cpu" : info.uuid);
}

} // namespace

std::vector<DeviceShare> device_shares(const Device& device, World& world) {
    const std::string mine = std::to_string(available_memory(device)) + "\n" +
                             memory_key(device.info()) + "\n" + (device.info().is_cpu ? "1" : "0") +
                             "\n" + device.info().driver + "\n" + device.info().name;
    HostCollectives everyone(world, Group::all(world.size()));
    std::vector<DeviceShare> shares;
    for (const auto& bytes : everyone.all_gather(std::as_bytes(std::span(mine)))) {
        std::istringstream text(
            std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
        DeviceShare& share = shares.emplace_back();
        text >> share.available >> std::ws;
        std::getline(text, share.where);
        text >> share.is_cpu >> std::ws;
        std::getline(text, share.driver);
        std::getline(text, share.name);
    }
    std::vector<DeviceShare> result = shares;
    for (std::size_t i = 0; i < shares.size(); ++i)
        for (std::size_t j = 0; j < shares.size(); ++j)
            if (shares[i].where == shares[j].where) {
                ++result[i].ranks;
                result[i].available = std::min(result[i].available, shares[j].available);
            }
    return result;
}

std::string describe_devices(const std::vector<DeviceShare>& shares) {
    std::map<std::string, std::map<std::string, std::uint64_t>> kinds; // ranks by device, by kind
    for (const DeviceShare& share : shares)
        ++kinds[share.name + ", " + (share.is_cpu ? "cpu" : "gpu") + ", driver " + share.driver]
               [share.where];
    std::string text;
    for (const auto& [kind, devices] : kinds) {
        const auto ranks = devices | std::views::values;
        const auto [least, most] = std::ranges::minmax(ranks);
        const bool one = devices.size() == 1;
        text += (text.empty() ? "" : "; ") +
                (one ? kind : std::to_string(devices.size()) + " of " + kind) + ": " +
                (least == most ? "" : std::to_string(least) + " to ") + std::to_string(most) +
                (most == 1 ? " rank on " : " ranks on ") + (one ? "it" : "each");
    }
    return text;
}

} // namespace bellows
