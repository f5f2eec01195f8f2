// SPDX-License-Identifier: MIT
#pragma once

// The tile of a workgroup of attention's kernels on matrix units.

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>

#include <cstdint>
#include <optional>

namespace bellows::ops {

/// Fields are constants of shaders/attention_coopmat_forward.comp.
struct AttentionTile {
    /// Bits depend on it, so it is the same everywhere.
    static constexpr std::uint32_t kBlock = 32;

    MatrixShape shape;
    std::uint32_t warps = 4;
    /// Weights stay in the invocations that hold their scores; else they pass through workgroup
    /// memory. Which of both is the device's and its numeric class's.
    std::optional<MatrixSlots> in_lane{};

    std::uint32_t rows() const { return shape.m * warps; }
    std::uint32_t local_size(const DeviceInfo& info) const { return info.subgroup_size * warps; }
    /// Workgroup memory of shaders/include/attention_coopmat.glsl.
    std::uint64_t shared_bytes(std::uint64_t qk_dim, std::uint64_t v_dim) const;
};

/// The largest that the device can run on the matrices of that class, with no more rows than
/// sequences of seq tokens fill; none where it has none, or heads of these sizes do not fit them.
/// slots: of these matrices, if they are known.
std::optional<AttentionTile> attention_tile(const DeviceInfo& info, const GemmClass& gemm_class,
                                            std::uint64_t qk_dim, std::uint64_t v_dim,
                                            std::uint64_t seq,
                                            const std::optional<MatrixSlots>& slots = {});

/// Sets the constants in_lane and lane_* of a kernel whose weights stay in its invocations.
template <class Constants>
void set_lanes(Constants& c, const MatrixShape& shape, const MatrixSlots& slots,
               std::uint32_t subgroup_size) {
    c.in_lane = 1;
    c.lane_rows = shape.m * shape.k / subgroup_size / slots.per_k;
    c.lane_row_place = slots.like_a->row;
    c.lane_row_slot = slots.a.slot;
    c.lane_row = slots.a.lane;
    c.lane_column_place = slots.sum.place;
    c.lane_column_slot = slots.sum.slot;
    c.lane_column = slots.sum.lane;
    c.lane_a = slots.like_a->sum_of_a;
}

/// Test aid: from now on weights pass through workgroup memory, whatever the device, or not.
void pass_weights_through_memory(Device& device, bool through);
bool passes_weights_through_memory(const Device& device);

} // namespace bellows::ops
