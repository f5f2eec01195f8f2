// SPDX-License-Identifier: MIT
#pragma once

// DeepSeek-V3's balance without a loss: after each step the bias of every expert moves by a fixed
// rate, up where fewer tokens than the layer's mean chose it, down where more did. Owned by the
// trainer.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace bellows {

class RouterBiases {
public:
    /// biases: at least one, [experts] f32 of as many experts each, which must outlive it.
    RouterBiases(Device& device, const std::vector<TensorView>& biases, double rate);

    /// loads: [layers, experts], summed over all ranks that hold the layers, in the biases' order.
    void update(std::span<const std::int64_t> loads);

private:
    Device& device_;
    Buffer summed_loads_;
    Recording update_;
};

} // namespace bellows
