// SPDX-License-Identifier: MIT
#include "dequantize.hpp"

#include "launch.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::fp8 {

namespace {

using Kernel = kernels::Fp8Dequantize;

/// Columns of an invocation: GPUs want what neighbours write side by side.
std::uint32_t unit_of(bool streamed, const TensorView& y) {
    return streamed || y.dtype == DType::BF16 ? 8 : 4;
}

/// What both grids share. Rows and groups, if there are any, are the caller's.
Kernel fill(const Operands& operands, const Quantized& q, const Matrix& codes, const TensorView& y,
            const Matrix& my, const LanePlan& plan, std::uint32_t unit) {
    const Scales s = operands.scales("scales", q, codes);
    return {.variant = y.dtype == DType::BF16 ? Kernel::Variant::bf16 : Kernel::Variant::f32,
            .constants = {.local_size = plan.local_size,
                          .lanes_x = plan.lanes_x,
                          .format = constant(q.recipe.format),
                          .blocks_form = static_cast<std::uint32_t>(q.recipe.blocks),
                          .exact = q.recipe.rule == ScaleRule::PowerOfTwo ? 1u : 0u,
                          .unit = unit},
            .codes = codes.memory,
            .scales = s.memory,
            .row_count = codes.memory,
            .group_offsets = codes.memory,
            .tiles = codes.memory,
            .y = my.memory,
            .rows = operands.u32("rows", codes.rows),
            .columns = operands.u32("columns", codes.columns),
            .codes_stride8 = codes.stride8,
            .codes_batch8 = codes.batch8,
            .scales_stride = s.stride,
            .scales_batch = s.batch,
            .y_stride8 = my.stride8,
            .y_batch8 = my.batch8};
}

} // namespace

void dequantize(Recording& recording, const Quantized& quantized, const TensorView& y, Form form) {
    const Operands operands("fp8::dequantize");
    const Matrix my = operands.activation("y", y, true);
    const Matrix mc = operands.codes("codes", quantized, my);
    const std::uint32_t groups = operands.groups(quantized);
    operands.scales("scales", quantized, mc);
    operands.require(y.rank == quantized.codes.rank,
                     "y is " + describe(y) + ", codes are " + describe(quantized.codes));
    if (mc.empty())
        return;
    const bool streamed = streams(recording, form);
    const std::uint32_t unit = unit_of(streamed, y);
    const std::uint64_t units = div_up(mc.columns, unit);
    const bool columns = quantized.recipe.blocks == Blocks::Columns128;
    // A workgroup has all 128 rows of its columns: fewer of these are more workgroups.
    const LanePlan plan = columns && !streamed ? LanePlan{128, 16} : plan_lanes(streamed, units);
    Kernel kernel = fill(operands, quantized, mc, y, my, plan, unit);
    const std::uint32_t steps = columns ? 32 / plan.step_rows() : (streamed ? 8 : 1);
    const std::uint64_t row_tiles =
        groups != 0 ? mc.rows / 128 + groups : div_up(mc.rows, steps * 4 * plan.step_rows());
    kernel.constants.steps = steps;
    kernel.row_tiles = operands.u32("row tiles", row_tiles);
    kernel.groups = groups;
    kernel.group_offsets = operands.group_offsets_or(quantized, mc.memory);
    kernel.row_count = operands.row_count_or(quantized.codes, mc.memory);
    kernel.has_row_count = quantized.codes.row_count ? 1 : 0;
    recording.dispatch(kernel, {clamp_groups(row_tiles),
                                operands.grid("columns", div_up(units, plan.lanes_x)),
                                operands.grid("the batch", mc.batch)});
}

void dequantize_groups(Recording& recording, const Quantized& quantized, const TensorView& y,
                       const ops::GroupTiles& groups) {
    const Operands operands("fp8::dequantize_groups");
    const Matrix my = operands.activation("y", y, false);
    const Matrix mc = operands.codes("codes", quantized, my);
    operands.require(quantized.recipe.blocks != Blocks::Columns128,
                     "128x1 blocks follow their own group_offsets");
    if (mc.empty())
        return;
    const bool streamed = streams(recording, Form::Device);
    const std::uint32_t unit = unit_of(streamed, y);
    const LanePlan plan = plan_lanes(streamed, div_up(mc.columns, unit));
    Kernel kernel = fill(operands, quantized, mc, y, my, plan, unit);
    kernel.constants.listed = 1;
    kernel.constants.steps =
        static_cast<std::uint32_t>(div_up(groups.tile_rows, 4 * plan.step_rows()));
    kernel.row_tiles = groups.tile_rows;
    kernel.tiles = groups.tiles;
    kernel.group_offsets = groups.rows.ends.buffer;
    recording.dispatch_indirect(kernel, groups.grid(groups.columns[0], false));
}

} // namespace bellows::fp8
