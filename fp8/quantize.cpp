// SPDX-License-Identifier: MIT
#include "launch.hpp"
#include "operands.hpp"

#include <bellows/engine/words64.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::fp8 {

namespace {

std::uint32_t codes_groups(const Matrix& m) {
    return static_cast<std::uint32_t>(2 * div_up(m.columns, 16));
}

void quantize_rows(Recording& recording, const Operands& operands, const TensorView& x,
                   const Matrix& mx, const Quantized& q, const Matrix& mc, const Scales& s,
                   Form form) {
    using K = kernels::Fp8QuantizeRows;
    const bool streamed = streams(recording, form);
    const bool is_mx = q.recipe.blocks == Blocks::MX32;
    const bool few = is_few(recording, form, mx.rows * mx.batch, mx.columns);
    const std::uint32_t at_once = few ? 1 : 4;
    // An invocation of a row loads 32 bytes at a time, 16 where there are few rows.
    const std::uint32_t eights = streamed || few || x.dtype == DType::F32 ? 1 : 2;
    const std::uint64_t lanes = codes_groups(mc) / eights;
    const LanePlan plan = plan_lanes(streamed, lanes);
    const std::uint64_t blocks = div_up(mx.columns, 128);
    Groups groups;
    if (streamed) {
        groups.x = clamp_groups(
            div_up(operands.u32("the number of blocks", mx.rows * blocks), plan.local_size));
    } else {
        groups.x = clamp_groups(div_up(mx.rows, at_once * plan.step_rows()));
        groups.y = operands.grid("columns", div_up(lanes, plan.lanes_x));
    }
    groups.z = operands.grid("the batch", mx.batch);
    recording.dispatch(K{.variant = row_variant<K>(recording.device(), x.dtype == DType::BF16),
                         .constants = {.local_size = plan.local_size,
                                       .lanes = streamed ? 1u : 16u / eights,
                                       .lanes_x = plan.lanes_x,
                                       .format = constant(q.recipe.format),
                                       .rule = constant(q.recipe.rule),
                                       .mx = is_mx ? 1u : 0u,
                                       .at_once = at_once},
                         .x = mx.memory,
                         .row_count = operands.row_count_or(x, mx.memory),
                         .codes = mc.memory,
                         .scales = s.memory,
                         .rows = operands.u32("rows", mx.rows),
                         .columns = operands.u32("columns", mx.columns),
                         .codes_groups = codes_groups(mc),
                         .x_stride8 = mx.stride8,
                         .x_batch8 = mx.batch8,
                         .codes_stride8 = mc.stride8,
                         .codes_batch8 = mc.batch8,
                         .scales_stride = is_mx ? s.stride / 4 : s.stride,
                         .scales_batch = s.batch,
                         .has_row_count = x.row_count ? 1u : 0u},
                       groups);
}

/// What quantize_tiles writes: codes and scales, or what they stand for.
struct Target {
    Recipe recipe;
    Matrix matrix;
    Scales scales;
    std::uint32_t groups = 0;
    BufferView group_offsets;
    bool decoded = false, transposed = false;
};

Target target(const Operands& operands, const Quantized& q, const Matrix& like) {
    const Matrix codes = operands.codes("codes", q, like);
    return {q.recipe, codes, operands.scales("scales", q, codes), operands.groups(q),
            operands.group_offsets_or(q, like.memory)};
}

Target target(const Operands& operands, const Decoded& d, const Matrix& like) {
    operands.require(d.recipe.blocks == Blocks::Columns128 &&
                         d.recipe.rule == ScaleRule::PowerOfTwo,
                     "the recipe is " + describe(d.recipe) +
                         "; values without codes are of 128x1 blocks with power-of-two scales");
    const Matrix values = operands.activation("the values", d.values, true);
    operands.require(d.values.dtype == DType::BF16 && values.batch == like.batch &&
                         values.rows == like.rows && values.columns == like.columns,
                     "the values are " + describe(d.values) + ", wanted are bf16 " +
                         describe(like));
    operands.require(!d.group_offsets.buffer || d.values.rank == 2,
                     "groups of rows are for values without batch, not for " + describe(d.values));
    const Quantized q{d.values, {}, d.recipe, d.group_offsets};
    return {d.recipe,
            values,
            {values.memory},
            operands.groups(q),
            operands.group_offsets_or(q, like.memory),
            true};
}

Target target(const Operands& operands, const Transposed& t, const Matrix& like) {
    operands.require_blocks("transposed codes", t.recipe, Blocks::Columns128);
    operands.require(like.batch == 1 && t.rows == like.rows,
                     "the transposed codes are of " + std::to_string(t.rows) +
                         " rows, wanted are those of " + describe(like));
    const Quantized q{t.codes, t.scales, t.recipe, t.group_offsets};
    const std::uint32_t groups = operands.groups(q);
    const Matrix codes = operands.codes("the transposed codes", q, false);
    const Shape shape = transposed_shape(t.recipe, {like.rows, like.columns}, groups);
    operands.require(codes.rows == shape.extent[0] && codes.columns == shape.extent[1] &&
                         t.codes.is_contiguous(),
                     "the transposed codes are " + describe(t.codes) + ", wanted are [" +
                         std::to_string(shape.extent[0]) + ", " + std::to_string(shape.extent[1]) +
                         "], contiguous, for " + describe(like));
    return {.recipe = t.recipe,
            .matrix = codes,
            .scales = operands.scales("scales", q, like),
            .groups = groups,
            .group_offsets = operands.group_offsets_or(q, like.memory),
            .transposed = true};
}

/// What quantize_tiles writes beside columns, and what it reads when that is FP8.
struct TileExtras {
    const Quantized* rows_out = nullptr;
    const Quantized* rows_in = nullptr;
    const RowsBySlots* by = nullptr; ///< rows_in
};

/// Whether codes become codes in f16 arithmetic.
bool requantizes_in_f16(const Device& device, const Recipe& rows, const Recipe& columns) {
    using K = kernels::Fp8QuantizeTiles;
    const auto exact = [](const Recipe& recipe) {
        return recipe.format == Format::E4M3 && recipe.rule == ScaleRule::PowerOfTwo;
    };
    return exact(rows) && exact(columns) &&
           device.why_not(K::info(), static_cast<std::uint32_t>(K::Variant::fp8_f16)).empty();
}

kernels::Fp8QuantizeTiles::Variant tiles_variant(const Recording& recording, const TensorView& x,
                                                 const Recipe& recipe, const Quantized* rows_in,
                                                 bool streamed) {
    using Variant = kernels::Fp8QuantizeTiles::Variant;
    if (rows_in == nullptr)
        return x.dtype == DType::BF16 ? Variant::bf16 : Variant::f32;
    return !streamed && requantizes_in_f16(recording.device(), rows_in->recipe, recipe)
               ? Variant::fp8_f16
               : Variant::fp8;
}

/// stored: x as it stands in memory. To: Quantized, Decoded or Transposed.
template <class To>
void quantize_tiles(Recording& recording, const Operands& operands, const TensorView& x,
                    const Matrix& stored, const To& to, const TileExtras& extras, bool streamed) {
    using K = kernels::Fp8QuantizeTiles;
    Matrix mx = stored;
    if (extras.by != nullptr)
        mx.rows = extras.by->slots.extent[0];
    const auto [recipe, mc, s, group_count, group_offsets, decoded, transposed] =
        target(operands, to, mx);
    if (mx.empty())
        return;
    const std::uint64_t row_tiles =
        group_count != 0 ? mx.rows / 128 + group_count : div_up(mx.rows, 128);
    const bool narrow = recipe.blocks == Blocks::Columns128 && extras.rows_out == nullptr;
    const std::uint32_t lanes_x = streamed || narrow ? 8 : 16;
    K kernel{.variant = tiles_variant(recording, x, recipe, extras.rows_in, streamed),
             .constants = {.local_size = streamed ? 8u : 16 * lanes_x,
                           .lanes_x = lanes_x,
                           .format = constant(recipe.format),
                           .rule = constant(recipe.rule),
                           .blocks = recipe.blocks == Blocks::Blocks128 ? 1u : 0u,
                           .decoded = decoded ? 1u : 0u,
                           .transposed = transposed ? 1u : 0u},
             .x = mx.memory,
             .x_scales = mx.memory,
             .row_count = operands.row_count_or(x, mx.memory),
             .group_offsets = group_offsets,
             .slots = mx.memory,
             .codes = mc.memory,
             .scales = s.memory,
             .row_codes = mc.memory,
             .row_scales = s.memory,
             .rows = operands.u32("rows", mx.rows),
             .columns = operands.u32("columns", mx.columns),
             .codes_groups = decoded || transposed ? operands.u32("columns", div_up(mx.columns, 8))
                                                   : codes_groups(mc),
             .row_tiles = operands.u32("row tiles", row_tiles),
             .groups = group_count,
             .x_stride8 = mx.stride8,
             .x_batch8 = mx.batch8,
             .codes_stride8 = mc.stride8,
             .codes_batch8 = mc.batch8,
             .scales_stride = s.stride,
             .scales_batch = s.batch,
             .has_row_count = x.row_count ? 1u : 0u};
    if (extras.rows_out != nullptr) {
        const Matrix row_codes = operands.codes("the rows' codes", *extras.rows_out, mx);
        const Scales row_scales = operands.scales("the rows' scales", *extras.rows_out, row_codes);
        kernel.constants.also_rows = 1;
        kernel.row_codes = row_codes.memory;
        kernel.row_scales = row_scales.memory;
        kernel.row_codes_stride8 = row_codes.stride8;
        kernel.row_scales_stride = row_scales.stride;
    }
    if (extras.rows_in != nullptr) {
        const Scales x_scales = operands.scales("the rows' scales", *extras.rows_in, stored);
        kernel.constants.input_format = constant(extras.rows_in->recipe.format);
        kernel.x_scales = x_scales.memory;
        kernel.x_scales_stride = x_scales.stride;
    }
    if (extras.by != nullptr) {
        kernel.slots = operands.vector("slots", extras.by->slots, DType::I32, mx.rows);
        kernel.slots_per_row = extras.by->slots_per_a_row;
    }
    const std::uint64_t tile_columns = streamed ? 128 : 8 * lanes_x;
    recording.dispatch(kernel, {operands.grid("columns", div_up(mx.columns, tile_columns)),
                                clamp_groups(row_tiles), operands.grid("the batch", mx.batch)});
}

void quantize_tensor(Recording& recording, const Operands& operands, const TensorView& x,
                     const Matrix& mx, const Quantized& q, const Matrix& mc, const Scales& s,
                     bool streamed) {
    const LanePlan plan = plan_lanes(streamed, codes_groups(mc));
    const std::uint32_t step_rows = plan.local_size / plan.lanes_x;
    const std::uint64_t row_blocks = div_up(mx.rows, 4 * step_rows);
    const Groups groups{clamp_groups(row_blocks),
                        operands.grid("columns", div_up(codes_groups(mc), plan.lanes_x)),
                        operands.grid("the batch", mx.batch)};
    const bool bf16 = x.dtype == DType::BF16;
    const BufferView row_count = operands.row_count_or(x, mx.memory);
    recording.fill(s.memory, 0);
    using Amax = kernels::Fp8Amax;
    recording.dispatch(Amax{.variant = bf16 ? Amax::Variant::bf16 : Amax::Variant::f32,
                            .constants = {.local_size = plan.local_size, .lanes_x = plan.lanes_x},
                            .x = mx.memory,
                            .row_count = row_count,
                            .amax = s.memory,
                            .rows = operands.u32("rows", mx.rows),
                            .columns = operands.u32("columns", mx.columns),
                            .x_stride8 = mx.stride8,
                            .x_batch8 = mx.batch8,
                            .has_row_count = x.row_count ? 1u : 0u},
                       groups);
    recording.dispatch(kernels::Fp8TensorScale{.constants = {.format = constant(q.recipe.format),
                                                             .rule = constant(q.recipe.rule)},
                                               .scale = s.memory},
                       {});
    using K = kernels::Fp8QuantizeTensor;
    recording.dispatch(K{.variant = bf16 ? K::Variant::bf16 : K::Variant::f32,
                         .constants = {.local_size = plan.local_size,
                                       .lanes_x = plan.lanes_x,
                                       .format = constant(q.recipe.format),
                                       .rule = constant(q.recipe.rule)},
                         .x = mx.memory,
                         .scale = s.memory,
                         .row_count = row_count,
                         .codes = mc.memory,
                         .rows = operands.u32("rows", mx.rows),
                         .columns = operands.u32("columns", mx.columns),
                         .codes_groups = codes_groups(mc),
                         .x_stride8 = mx.stride8,
                         .x_batch8 = mx.batch8,
                         .codes_stride8 = mc.stride8,
                         .codes_batch8 = mc.batch8,
                         .has_row_count = x.row_count ? 1u : 0u},
                       groups);
}

/// x and codes of encode and decode, in groups of four.
std::uint32_t check_flat(const Operands& operands, const TensorView& values,
                         const TensorView& codes) {
    const auto say = [&] { return "x is " + describe(values) + ", codes are " + describe(codes); };
    const std::uint64_t count = values.num_elements();
    operands.require(values.dtype == DType::F32 &&
                         (codes.dtype == DType::F8E4M3 || codes.dtype == DType::F8E5M2),
                     say() + ", wanted are f32 and f8");
    operands.require(values.is_contiguous() && codes.is_contiguous() &&
                         codes.num_elements() == count && count % 4 == 0,
                     say() + ", wanted are equally many elements, a multiple of 4, contiguous");
    operands.require(count == 0 || (values.buffer && codes.buffer &&
                                    values.buffer.offset % 16 == 0 && codes.buffer.offset % 4 == 0),
                     say() + ", wanted is memory at multiples of 16 and 4 bytes");
    return operands.u32("a quarter of the elements", count / 4);
}

struct FlatPlan {
    std::uint32_t local_size, run;
    Groups groups;
};

FlatPlan plan_flat(const Recording& recording, std::uint32_t count4) {
    const bool cpu = recording.device().info().is_cpu;
    FlatPlan plan{cpu ? 8u : 128u, cpu ? 16u : 4u, {}};
    plan.groups.x = clamp_groups(div_up(count4, plan.local_size * plan.run));
    return plan;
}

} // namespace

void encode(Recording& recording, const TensorView& x, const TensorView& codes) {
    const Operands operands("fp8::encode");
    const std::uint32_t count4 = check_flat(operands, x, codes);
    if (count4 == 0)
        return;
    const FlatPlan plan = plan_flat(recording, count4);
    recording.dispatch(kernels::Fp8Encode{.constants = {plan.local_size, plan.run,
                                                        codes.dtype == DType::F8E4M3 ? 0u : 1u},
                                          .x = x.buffer.sub(0, x.num_bytes()),
                                          .codes = codes.buffer.sub(0, codes.num_bytes()),
                                          .count4 = count4},
                       plan.groups);
}

void decode(Recording& recording, const TensorView& codes, const TensorView& y) {
    const Operands operands("fp8::decode");
    const std::uint32_t count4 = check_flat(operands, y, codes);
    if (count4 == 0)
        return;
    const FlatPlan plan = plan_flat(recording, count4);
    recording.dispatch(kernels::Fp8Decode{.constants = {plan.local_size, plan.run,
                                                        codes.dtype == DType::F8E4M3 ? 0u : 1u},
                                          .codes = codes.buffer.sub(0, codes.num_bytes()),
                                          .y = y.buffer.sub(0, y.num_bytes()),
                                          .count4 = count4},
                       plan.groups);
}

void quantize(Recording& recording, const TensorView& x, const Quantized& quantized, Form form) {
    const Operands operands("fp8::quantize");
    const Matrix mx = operands.activation("x", x, true);
    const Matrix mc = operands.codes("codes", quantized, mx);
    const Scales s = operands.scales("scales", quantized, mc);
    operands.require(x.rank == quantized.codes.rank,
                     "x is " + describe(x) + ", codes are " + describe(quantized.codes));
    if (mx.empty())
        return;
    const bool streamed = streams(recording, form);
    switch (quantized.recipe.blocks) {
    case Blocks::Rows128:
    case Blocks::MX32:
        quantize_rows(recording, operands, x, mx, quantized, mc, s, form);
        break;
    case Blocks::Columns128:
    case Blocks::Blocks128:
        quantize_tiles(recording, operands, x, mx, quantized, {}, streamed);
        break;
    case Blocks::PerTensor:
        quantize_tensor(recording, operands, x, mx, quantized, mc, s, streamed);
        break;
    }
}

void quantize(Recording& recording, const TensorView& x, const Decoded& decoded, Form form) {
    const Operands operands("fp8::quantize");
    quantize_tiles(recording, operands, x, operands.activation("x", x, true), decoded, {},
                   streams(recording, form));
}

void quantize(Recording& recording, const TensorView& x, const Transposed& transposed, Form form) {
    const Operands operands("fp8::quantize");
    quantize_tiles(recording, operands, x, operands.activation("x", x, false), transposed, {},
                   streams(recording, form));
}

void quantize_rows_and_columns(Recording& recording, const TensorView& x, const Quantized& rows,
                               const Quantized& columns, Form form) {
    const Operands operands("fp8::quantize_rows_and_columns");
    operands.require_blocks("rows", rows.recipe, Blocks::Rows128);
    operands.require_blocks("columns", columns.recipe, Blocks::Columns128);
    operands.require(rows.recipe.format == columns.recipe.format &&
                         rows.recipe.rule == columns.recipe.rule,
                     "rows are " + describe(rows.recipe) + ", columns are " +
                         describe(columns.recipe) + "; format and scale rule must be the same");
    const Matrix mx = operands.activation("x", x, false);
    quantize_tiles(recording, operands, x, mx, columns, {.rows_out = &rows},
                   streams(recording, form));
}

namespace {

template <class To>
void requantize_rows(Recording& recording, const Quantized& rows, const To& columns, Form form) {
    const Operands operands("fp8::requantize");
    operands.require_blocks("rows", rows.recipe, Blocks::Rows128);
    operands.require_blocks("columns", columns.recipe, Blocks::Columns128);
    quantize_tiles(recording, operands, rows.codes, operands.codes("the rows' codes", rows, false),
                   columns, {.rows_in = &rows}, streams(recording, form));
}

template <class To>
void requantize_by_slots(Recording& recording, const Quantized& rows, const RowsBySlots& by,
                         const To& columns, Form form) {
    const Operands operands("fp8::requantize");
    operands.require_blocks("rows", rows.recipe, Blocks::Rows128);
    operands.require_blocks("columns", columns.recipe, Blocks::Columns128);
    operands.require(by.slots.rank == 1 && by.slots_per_a_row > 0,
                     "slots are " + describe(by.slots) + ", " + std::to_string(by.slots_per_a_row) +
                         " of them a row: wanted are i32 [rows], at least one a row");
    const Matrix mx = operands.codes("the rows' codes", rows, false);
    if (mx.empty())
        return;
    TensorView view = rows.codes;
    view.row_count = by.slots.row_count;
    quantize_tiles(recording, operands, view, mx, columns, {.rows_in = &rows, .by = &by},
                   streams(recording, form));
}

} // namespace

void requantize(Recording& recording, const Quantized& rows, const Quantized& columns, Form form) {
    requantize_rows(recording, rows, columns, form);
}

void requantize(Recording& recording, const Quantized& rows, const Decoded& columns, Form form) {
    requantize_rows(recording, rows, columns, form);
}

void requantize(Recording& recording, const Quantized& rows, const Transposed& columns, Form form) {
    requantize_rows(recording, rows, columns, form);
}

void requantize(Recording& recording, const Quantized& rows, const RowsBySlots& by,
                const Quantized& columns, Form form) {
    requantize_by_slots(recording, rows, by, columns, form);
}

void requantize(Recording& recording, const Quantized& rows, const RowsBySlots& by,
                const Decoded& columns, Form form) {
    requantize_by_slots(recording, rows, by, columns, form);
}

void requantize(Recording& recording, const Quantized& rows, const RowsBySlots& by,
                const Transposed& columns, Form form) {
    requantize_by_slots(recording, rows, by, columns, form);
}

} // namespace bellows::fp8
