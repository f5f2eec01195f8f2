// SPDX-License-Identifier: MIT
#pragma once

// DeepSeek-V3's balance without a loss: after each step the bias of every expert moves by a fixed
// rate, up where fewer tokens than the layer's mean chose it, down where more did. The loads are
// those of all ranks that hold the layers, summed between collect() and update() by the caller.

#include <bellows/engine/recording.hpp>
#include <bellows/model/parameter_store.hpp>

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

namespace bellows {

class RouterBiases {
public:
    struct Layer {
        TensorView loads; ///< [experts] u32, MoeFfn::expert_loads
        TensorView bias;  ///< [experts] f32
    };
    /// layers: at least one, all of as many experts, in the same order on all ranks that hold them.
    /// All must outlive it.
    RouterBiases(Device& device, std::vector<Layer> layers, double rate);

    /// The loads since the last call, [layers, experts]. Waits for the forward passes that have
    /// been handed in, where the device has a queue for what is beside them no longer, up to
    /// `limit`.
    std::vector<std::int64_t> collect(std::chrono::milliseconds limit);
    /// Of those, summed over the ranks.
    void update(std::span<const std::int64_t> loads);

private:
    Device& device_;
    Buffer host_loads_, summed_loads_;
    Recording collect_, update_;
};

} // namespace bellows
