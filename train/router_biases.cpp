// SPDX-License-Identifier: MIT
#include "router_biases.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/ops.hpp>

#include <algorithm>

namespace bellows {

RouterBiases::RouterBiases(Device& device, const std::vector<TensorView>& biases, double rate)
    : device_(device), update_(device, QueueRole::Compute, "update router biases") {
    const std::uint64_t experts = biases.front().extent[0];
    const std::uint64_t each = experts * size_of(DType::U32);
    summed_loads_ = Buffer(device_, {.name = "summed expert loads",
                                     .bytes = biases.size() * each,
                                     .kind = MemoryKind::Upload,
                                     .category = MemoryCategory::Scratch});
    for (std::size_t i = 0; i < biases.size(); ++i)
        ops::router_bias_update(
            update_,
            TensorView::contiguous(summed_loads_.view().sub(i * each, each), DType::U32, {experts}),
            biases[i], static_cast<float>(rate));
}

void RouterBiases::update(std::span<const std::int64_t> loads) {
    std::transform(loads.begin(), loads.end(), summed_loads_.mapped_as<std::uint32_t>().begin(),
                   [](std::int64_t load) { return static_cast<std::uint32_t>(load); });
    device_.submit(update_);
}

} // namespace bellows
