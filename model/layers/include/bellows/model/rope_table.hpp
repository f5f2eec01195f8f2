// SPDX-License-Identifier: MIT
#pragma once

// The rotations of a model's attention layers, by position: one table serves all of them.

#include <bellows/engine/device.hpp>
#include <bellows/engine/memory.hpp>
#include <bellows/engine/tensor.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>

namespace bellows {

/// Cosines and sines of the rotated dimensions, times rope_amplitude(config) (shape/rope.hpp).
class RopeTable {
public:
    /// positions: tokens of the longest sequence.
    RopeTable(Device& device, const ModelConfig& config, std::uint64_t positions);
    /// [positions, config.rope_head_dim() / 2, 2] f32.
    const TensorView& view() const noexcept { return view_; }

private:
    Buffer buffer_;
    TensorView view_;
};

} // namespace bellows
