// SPDX-License-Identifier: MIT
#include "load_collector.hpp"

#include <bellows/engine/device.hpp>

namespace bellows {

LoadCollector::LoadCollector(Device& device, const std::vector<TensorView>& loads)
    : device_(device), recording_(device, QueueRole::AsyncCompute, "collect loads") {
    const std::uint64_t each = loads.front().num_bytes();
    host_loads_ = Buffer(device_, {.name = "expert loads",
                                   .bytes = loads.size() * each,
                                   .kind = MemoryKind::Readback,
                                   .category = MemoryCategory::Scratch});
    for (std::size_t i = 0; i < loads.size(); ++i) {
        recording_.copy(loads[i].buffer, host_loads_.view().sub(i * each, each));
        recording_.fill(loads[i].buffer, 0);
    }
}

std::vector<std::int64_t> LoadCollector::collect(std::chrono::milliseconds limit) {
    device_.submit(recording_).wait(limit);
    const auto loads = host_loads_.mapped_as<const std::uint32_t>();
    return {loads.begin(), loads.end()};
}

} // namespace bellows
