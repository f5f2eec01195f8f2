// SPDX-License-Identifier: MIT
#include "router_biases.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/ops.hpp>

#include <algorithm>

namespace bellows {

RouterBiases::RouterBiases(Device& device, std::vector<Layer> layers, double rate)
    : device_(device), collect_(device, QueueRole::AsyncCompute, "collect loads"),
      update_(device, QueueRole::Compute, "update router biases") {
    const std::uint64_t each = layers.front().loads.num_bytes();
    const auto make = [&](const char* name, MemoryKind kind) {
        return Buffer(device_, {.name = name,
                                .bytes = layers.size() * each,
                                .kind = kind,
                                .category = MemoryCategory::Scratch});
    };
    host_loads_ = make("expert loads", MemoryKind::Readback);
    summed_loads_ = make("summed expert loads", MemoryKind::Upload);
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const TensorView& loads = layers[i].loads;
        collect_.copy(loads.buffer, host_loads_.view().sub(i * each, each));
        collect_.fill(loads.buffer, 0);
        ops::router_bias_update(update_,
                                TensorView::contiguous(summed_loads_.view().sub(i * each, each),
                                                       DType::U32, {loads.extent[0]}),
                                layers[i].bias, static_cast<float>(rate));
    }
}

std::vector<std::int64_t> RouterBiases::collect(std::chrono::milliseconds limit) {
    device_.submit(collect_).wait(limit);
    const auto loads = host_loads_.mapped_as<const std::uint32_t>();
    return {loads.begin(), loads.end()};
}

void RouterBiases::update(std::span<const std::int64_t> loads) {
    std::transform(loads.begin(), loads.end(), summed_loads_.mapped_as<std::uint32_t>().begin(),
                   [](std::int64_t load) { return static_cast<std::uint32_t>(load); });
    device_.submit(update_);
}

} // namespace bellows
