// SPDX-License-Identifier: MIT
#include "launch.hpp"
#include "operands.hpp"

#include <bellows/fp8/fused.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <optional>

namespace bellows::fp8 {

namespace {

/// Fours of elements of a scale's block.
constexpr std::uint64_t kBlockFours = 32;

/// Sizes of the kernels with shaders/include/fp8_row_blocks.glsl. Sums over a row have the order of
/// the engine's ops: its rule gives a row to an invocation on CPU drivers, else to a workgroup of
/// so many.
struct RowPlan {
    std::uint32_t local_size = 8;
    std::uint32_t row_per_workgroup = 0;
    std::uint32_t kept = 2; ///< the least that the kernels' shared memory allows with local_size 8
    bool whole = false;     ///< kept * local_size fours are all of a row's
    std::uint32_t sum_columns = 0; ///< of the kernels' constant
    std::uint32_t wide = 1;        ///< fours that an invocation takes side by side
    Groups groups;
};

/// A workgroup's invocations take rows of up to `most` times `wide` fours whole, others in parts of
/// `part` or less.
RowPlan plan_rows(bool streamed, std::uint64_t rows, std::uint64_t fours, std::uint64_t most,
                  std::uint64_t part, std::uint32_t wide) {
    RowPlan plan;
    if (streamed) {
        plan.groups.x = clamp_groups(div_up(rows, plan.local_size));
        return plan;
    }
    plan.local_size = fours >= 96 ? 128 : (fours >= 48 ? 64 : 32);
    plan.row_per_workgroup = 1;
    const std::uint64_t steps = div_up(fours, plan.local_size);
    plan.wide = fours % wide == 0 ? wide : 1;
    plan.local_size /= plan.wide;
    plan.whole = steps <= most;
    plan.kept = static_cast<std::uint32_t>(plan.whole ? steps : div_up(steps, div_up(steps, part)));
    plan.groups.x = clamp_groups(rows);
    return plan;
}

/// Invocations enough for a row of so many fours to take one step, and sums in plan_rows' order;
/// none where a workgroup has fewer, or rows are not few.
std::optional<RowPlan> plan_few_rows(const DeviceInfo& info, std::uint64_t rows,
                                     std::uint64_t fours) {
    constexpr std::uint32_t kWide = 2;
    const RowPlan usual = plan_rows(false, rows, fours, 1, 1, 1);
    RowPlan plan = usual;
    plan.sum_columns = usual.local_size;
    // One four for each invocation, or two if it must be.
    for (plan.wide = 1; plan.wide <= kWide; ++plan.wide) {
        const std::uint64_t local_size = round_up(div_up(fours, plan.wide), kBlockFours);
        if (fours % plan.wide != 0 || local_size < plan.sum_columns ||
            local_size > std::min<std::uint64_t>(info.max_workgroup_invocations, 1024))
            continue;
        plan.local_size = static_cast<std::uint32_t>(local_size);
        plan.kept = 1;
        plan.whole = true;
        return plan;
    }
    return std::nullopt;
}

/// The same as plan_rows for rows without sums, which may be shared out; a workgroup's invocations
/// take up to `part` times `wide` fours, so that few idle.
RowPlan plan_parts(bool streamed, std::uint64_t rows, std::uint64_t fours, std::uint32_t part,
                   std::uint32_t wide) {
    RowPlan plan = plan_rows(streamed, rows, fours, part, part, 1);
    if (streamed) {
        if (rows < 64)
            plan.groups.y = clamp_groups(div_up(fours, kBlockFours));
        return plan;
    }
    plan.wide = fours % wide == 0 ? wide : 1;
    std::uint64_t least = ~std::uint64_t{0};
    for (const std::uint32_t local_size : {128u, 64u})
        for (std::uint32_t kept = part; 2 * kept >= part && kept > 0; --kept) {
            const std::uint64_t chunk = std::uint64_t{local_size} * kept * plan.wide;
            const std::uint64_t parts = div_up(fours, chunk);
            if (parts * chunk < least) {
                least = parts * chunk;
                plan.local_size = local_size;
                plan.kept = kept;
                plan.groups.y = clamp_groups(parts);
            }
        }
    return plan;
}

/// Fours in 16 bytes.
std::uint32_t fours_in_16_bytes(DType dtype) {
    return static_cast<std::uint32_t>(4 / size_of(dtype));
}

/// Fours of a row of codes with its padding.
std::uint32_t codes_fours(const Matrix& m) {
    return static_cast<std::uint32_t>(4 * div_up(m.columns, 16));
}

/// Steps of a row in parts, by all of which invocations note maxima in the kernels' shared memory,
/// 0 where that is too much.
std::uint32_t noted_steps(const RowPlan& plan, std::uint64_t fours) {
    const std::uint64_t chunk = std::uint64_t{plan.local_size} * plan.kept * plan.wide;
    const std::uint64_t steps = div_up(fours, chunk) * plan.kept;
    return steps * plan.local_size <= 2048 ? static_cast<std::uint32_t>(steps) : 0;
}

void require_fours(const Operands& operands, const char* what, std::uint64_t columns) {
    operands.require(columns % 4 == 0, std::string(what) + " is " + std::to_string(columns) +
                                           ", not a multiple of 4");
}

/// Codes and scales that a kernel writes.
struct Result {
    Matrix codes;
    Scales scales;
};

Result result(const Operands& operands, const char* codes, const char* scales,
              const Quantized& quantized, const Matrix& like) {
    operands.require_blocks(codes, quantized.recipe, Blocks::Rows128);
    operands.require(quantized.codes.rank == 2, std::string(codes) + " are " +
                                                    describe(quantized.codes) +
                                                    ", wanted are 2 dimensions");
    Result r;
    r.codes = operands.codes(codes, quantized, like);
    r.scales = operands.scales(scales, quantized, r.codes);
    return r;
}

/// A matrix of these sizes and of `dtype`.
Matrix plain(const Operands& operands, const char* name, const TensorView& view, DType dtype,
             std::uint64_t rows, std::uint64_t columns) {
    operands.require(view.dtype == dtype && view.rank == 2 && view.extent[0] == rows &&
                         view.extent[1] == columns,
                     std::string(name) + " is " + describe(view) + ", wanted is " +
                         to_string(dtype) + " [" + std::to_string(rows) + ", " +
                         std::to_string(columns) + "]");
    return operands.activation(name, view, false);
}

/// Gate and up as a kernel reads them.
struct GateUp {
    Matrix m;
    const Quantized* quantized = nullptr; ///< or f32 or bf16
    Scales scales;
    DType dtype = DType::F32;
    TensorView counted; ///< whose row counts they have

    std::uint64_t ffn() const { return m.columns / 2; }
    std::uint32_t input_format() const {
        return quantized == nullptr ? 0 : constant(quantized->recipe.format);
    }
};

GateUp gate_up_of(const Operands& operands, const TensorView& view) {
    GateUp g;
    g.m = operands.activation("gate_up", view, false);
    g.dtype = view.dtype;
    g.counted = view;
    return g;
}

GateUp gate_up_of(const Operands& operands, const Quantized& quantized) {
    operands.require_blocks("gate_up's codes", quantized.recipe, Blocks::Rows128);
    GateUp g;
    g.m = operands.codes("gate_up's codes", quantized, false);
    g.quantized = &quantized;
    g.scales = operands.scales("gate_up's scales", quantized, g.m);
    g.dtype = quantized.codes.dtype;
    g.counted = quantized.codes;
    return g;
}

void check_ffn(const Operands& operands, const GateUp& gate_up, std::uint64_t ffn) {
    operands.require(gate_up.m.columns == 2 * ffn,
                     "gate_up has " + std::to_string(gate_up.m.columns) +
                         " columns, wanted are 2 x " + std::to_string(ffn));
    require_fours(operands, "ffn", ffn);
}

/// row_weight or d_row_weight; `otherwise` where it is left out.
BufferView weights_or(const Operands& operands, const char* name, const TensorView& view,
                      std::uint64_t rows, BufferView otherwise) {
    return view.buffer ? operands.vector(name, view, DType::F32, rows) : otherwise;
}

/// Whether gate and up are decoded in f16 arithmetic, by the kernel K's variant `in_f16`.
template <class K>
bool decodes_in_f16(const Recording& recording, const GateUp& gate_up, bool streamed,
                    typename K::Variant in_f16) {
    return !streamed && gate_up.quantized != nullptr &&
           gate_up.quantized->recipe.format == Format::E4M3 &&
           recording.device().why_not(K::info(), static_cast<std::uint32_t>(in_f16)).empty();
}

kernels::Fp8Swiglu::Variant swiglu_variant(const Recording& recording, const GateUp& gate_up,
                                           bool streamed) {
    using K = kernels::Fp8Swiglu;
    using Variant = K::Variant;
    if (gate_up.quantized == nullptr)
        return gate_up.dtype == DType::BF16 ? Variant::bf16 : Variant::f32;
    return decodes_in_f16<K>(recording, gate_up, streamed, Variant::fp8_f16) ? Variant::fp8_f16
                                                                             : Variant::fp8;
}

void record_swiglu(Recording& recording, const Operands& operands, const GateUp& gate_up,
                   const TensorView& row_weight, const Quantized& hidden, Form form) {
    operands.require(hidden.codes.rank == 2,
                     "hidden's codes are " + describe(hidden.codes) + ", wanted are 2 dimensions");
    check_ffn(operands, gate_up, hidden.codes.extent[1]);
    const Matrix& m = gate_up.m;
    const std::uint64_t ffn = gate_up.ffn();
    const Result to = result(operands, "hidden's codes", "hidden's scales", hidden,
                             Matrix{.rows = m.rows, .columns = ffn});
    if (m.empty())
        return;
    using K = kernels::Fp8Swiglu;
    const std::uint32_t wide = fours_in_16_bytes(gate_up.dtype);
    const bool streamed = streams(recording, form);
    const RowPlan plan = is_few(recording, form, m.rows, ffn)
                             ? plan_parts(false, m.rows, ffn / 4, 1, 1)
                             : plan_parts(streamed, m.rows, ffn / 4, wide == 4 ? 2 : 4, wide);
    recording.dispatch(
        K{.variant = swiglu_variant(recording, gate_up, streamed),
          .constants = {.local_size = plan.local_size,
                        .row_per_workgroup = plan.row_per_workgroup,
                        .kept = plan.kept,
                        .wide = plan.wide,
                        .format = constant(hidden.recipe.format),
                        .rule = constant(hidden.recipe.rule),
                        .input_format = gate_up.input_format()},
          .gate_up = m.memory,
          .gate_up_scales = gate_up.quantized != nullptr ? gate_up.scales.memory : m.memory,
          .row_weight = weights_or(operands, "row_weight", row_weight, m.rows, m.memory),
          .row_count = gate_up.counted.row_counts_or(m.memory),
          .codes = to.codes.memory,
          .scales = to.scales.memory,
          .rows = operands.u32("rows", m.rows),
          .ffn4 = operands.u32("ffn", ffn / 4),
          .codes4 = codes_fours(to.codes),
          .gate_up_stride4 = operands.stride4(m),
          .gate_up_scales_stride = gate_up.scales.stride,
          .codes_stride4 = operands.stride4(to.codes),
          .scales_stride = to.scales.stride,
          .has_row_weight = row_weight.buffer ? 1u : 0u,
          .rows_per_count = operands.u32("rows of a count", gate_up.counted.counted_rows())},
        plan.groups);
}

kernels::Fp8SwigluDgrad::Variant dgrad_variant(const Recording& recording, const GateUp& gate_up,
                                               DType dtype, bool streamed) {
    using K = kernels::Fp8SwigluDgrad;
    using Variant = K::Variant;
    const bool bf16 = dtype == DType::BF16;
    if (gate_up.quantized == nullptr)
        return bf16 ? Variant::bf16 : Variant::f32;
    const Variant in_f16 = bf16 ? Variant::fp8_f16_bf16 : Variant::fp8_f16_f32;
    if (decodes_in_f16<K>(recording, gate_up, streamed, in_f16))
        return in_f16;
    return bf16 ? Variant::fp8_bf16 : Variant::fp8_f32;
}

/// Where the kernel writes, checked; operands that it does not use name memory that it does.
struct Gradients {
    Matrix stored;
    Result quantized;
    BufferView d_row_weight;
};

Gradients gradients(const Operands& operands, const SwigluGradients& to, const GateUp& gate_up,
                    DType dtype) {
    const Matrix& m = gate_up.m;
    const bool quantizes = static_cast<bool>(to.quantized.codes.buffer);
    operands.require(quantizes || to.stored.buffer,
                     "neither codes nor a tensor for the gradients are given");
    Gradients g;
    if (quantizes) {
        operands.require(gate_up.ffn() % 128 == 0,
                         "ffn is " + std::to_string(gate_up.ffn()) +
                             ", not a multiple of 128: a block would hold gate and up");
        g.quantized = result(operands, "the gradients' codes", "the gradients' scales",
                             to.quantized, Matrix{.rows = m.rows, .columns = m.columns});
    }
    if (to.stored.buffer)
        g.stored = plain(operands, "the stored gradient", to.stored, dtype, m.rows, m.columns);
    if (!quantizes) {
        g.quantized.codes.memory = g.stored.memory;
        g.quantized.scales.memory = g.stored.memory;
    } else if (!to.stored.buffer) {
        g.stored.memory = g.quantized.codes.memory;
    }
    g.d_row_weight = weights_or(operands, "d_row_weight", to.d_row_weight, m.rows, g.stored.memory);
    return g;
}

void record_dgrad(Recording& recording, const Operands& operands, const TensorView& d_hidden,
                  const GateUp& gate_up, const TensorView& row_weight, const SwigluGradients& to,
                  Form form) {
    const Matrix d = operands.activation("d_hidden", d_hidden, false);
    check_ffn(operands, gate_up, d.columns);
    const Matrix& m = gate_up.m;
    operands.require(d.rows == m.rows, "d_hidden has " + std::to_string(d.rows) +
                                           " rows, gate_up " + std::to_string(m.rows));
    operands.require(gate_up.quantized != nullptr || gate_up.dtype == d_hidden.dtype,
                     std::string("d_hidden is ") + to_string(d_hidden.dtype) + ", gate_up " +
                         to_string(gate_up.dtype));
    const bool weighted = static_cast<bool>(row_weight.buffer);
    operands.require(weighted == static_cast<bool>(to.d_row_weight.buffer),
                     "row_weight and d_row_weight must both be given or both be left out");
    const Gradients g = gradients(operands, to, gate_up, d_hidden.dtype);
    if (m.empty())
        return;
    const bool streamed = streams(recording, form);
    const std::uint64_t ffn4 = gate_up.ffn() / 4;
    const std::uint32_t wide = fours_in_16_bytes(d_hidden.dtype), part = 4 / wide;
    const RowPlan plan = weighted ? plan_rows(streamed, m.rows, ffn4, part, part, wide)
                                  : plan_parts(streamed, m.rows, ffn4, part, wide);
    recording.dispatch(
        kernels::Fp8SwigluDgrad{
            .variant = dgrad_variant(recording, gate_up, d_hidden.dtype, streamed),
            .constants = {.local_size = plan.local_size,
                          .row_per_workgroup = plan.row_per_workgroup,
                          .kept = plan.kept,
                          .wide = plan.wide,
                          .format = constant(to.quantized.recipe.format),
                          .rule = constant(to.quantized.recipe.rule),
                          .input_format = gate_up.input_format(),
                          .quantized = to.quantized.codes.buffer ? 1u : 0u,
                          .stored = to.stored.buffer ? 1u : 0u},
            .d_out = d.memory,
            .gate_up = m.memory,
            .gate_up_scales = gate_up.quantized != nullptr ? gate_up.scales.memory : m.memory,
            .row_weight = weights_or(operands, "row_weight", row_weight, m.rows, m.memory),
            .row_count = operands.row_count_or(gate_up.counted, m.memory),
            .d_gate_up = g.stored.memory,
            .codes = g.quantized.codes.memory,
            .scales = g.quantized.scales.memory,
            .d_row_weight = g.d_row_weight,
            .rows = operands.u32("rows", m.rows),
            .ffn4 = operands.u32("ffn", ffn4),
            .d_out_stride4 = operands.stride4(d),
            .gate_up_stride4 = operands.stride4(m),
            .gate_up_scales_stride = gate_up.scales.stride,
            .d_gate_up_stride4 = operands.stride4(g.stored),
            .codes_stride4 = operands.stride4(g.quantized.codes),
            .scales_stride = g.quantized.scales.stride,
            .has_row_weight = weighted ? 1u : 0u,
            .has_row_count = gate_up.counted.row_count ? 1u : 0u},
        plan.groups);
}

} // namespace

void rmsnorm(Recording& recording, const TensorView& x, const TensorView& gain,
             const Quantized& quantized, const TensorView& inv_rms, float eps, const TensorView& y,
             Form form) {
    const Operands operands("fp8::rmsnorm");
    const Matrix m = operands.activation("x", x, false);
    operands.require(m.columns > 0, "there are no columns");
    require_fours(operands, "the number of columns", m.columns);
    const bool bf16 = x.dtype == DType::BF16;
    const bool gain_bf16 = bf16 && gain.dtype == DType::BF16;
    const BufferView gain_memory =
        operands.vector("gain", gain, gain_bf16 ? DType::BF16 : DType::F32, m.columns, 16);
    const Result to = result(operands, "codes", "scales", quantized, m);
    if (m.empty())
        return;
    const Matrix my = y.buffer ? plain(operands, "y", y, x.dtype, m.rows, m.columns) : Matrix{};
    using K = kernels::Fp8Rmsnorm;
    // Rows of f32 stay in registers; with those of bf16, whose arithmetic weighs more, parts that
    // are read once more from the cache leave registers to more workgroups. Maxima that are taken
    // beside the sum need fewer.
    const bool streamed = streams(recording, form);
    const bool power_of_two = quantized.recipe.rule == ScaleRule::PowerOfTwo;
    const auto few = is_few(recording, form, m.rows, m.columns)
                         ? plan_few_rows(recording.device().info(), m.rows, m.columns / 4)
                         : std::nullopt;
    const RowPlan plan = few ? *few
                             : plan_rows(streamed, m.rows, m.columns / 4, bf16 ? 4 : 16,
                                         bf16 && !power_of_two ? 4 : 8, fours_in_16_bytes(x.dtype));
    const bool beside = !streamed && !plan.whole && power_of_two;
    recording.dispatch(K{.variant = gain_bf16 ? K::Variant::bf16_bf16
                                              : (bf16 ? K::Variant::bf16 : K::Variant::f32),
                         .constants = {.local_size = plan.local_size,
                                       .row_per_workgroup = plan.row_per_workgroup,
                                       .kept = plan.kept,
                                       .wide = plan.wide,
                                       .format = constant(quantized.recipe.format),
                                       .rule = constant(quantized.recipe.rule),
                                       .whole = plan.whole ? 1u : 0u,
                                       .steps = beside ? noted_steps(plan, m.columns / 4) : 0,
                                       .store_y = y.buffer ? 1u : 0u,
                                       .sum_columns = plan.sum_columns},
                         .x = m.memory,
                         .gain = gain_memory,
                         .row_count = operands.row_count_or(x, m.memory),
                         .y = y.buffer ? my.memory : to.codes.memory,
                         .inv_rms = operands.vector("inv_rms", inv_rms, DType::F32, m.rows),
                         .codes = to.codes.memory,
                         .scales = to.scales.memory,
                         .rows = operands.u32("rows", m.rows),
                         .columns4 = operands.u32("columns", m.columns / 4),
                         .codes4 = codes_fours(to.codes),
                         .x_stride4 = operands.stride4(m),
                         .y_stride4 = operands.stride4(my),
                         .codes_stride4 = operands.stride4(to.codes),
                         .scales_stride = to.scales.stride,
                         .has_row_count = x.row_count ? 1u : 0u,
                         .eps = eps},
                       plan.groups);
}

void swiglu(Recording& recording, const TensorView& gate_up, const TensorView& row_weight,
            const Quantized& hidden, Form form) {
    const Operands operands("fp8::swiglu");
    record_swiglu(recording, operands, gate_up_of(operands, gate_up), row_weight, hidden, form);
}

void swiglu(Recording& recording, const Quantized& gate_up, const TensorView& row_weight,
            const Quantized& hidden, Form form) {
    const Operands operands("fp8::swiglu");
    record_swiglu(recording, operands, gate_up_of(operands, gate_up), row_weight, hidden, form);
}

void swiglu_dgrad(Recording& recording, const TensorView& d_hidden, const TensorView& gate_up,
                  const TensorView& row_weight, const SwigluGradients& to, Form form) {
    const Operands operands("fp8::swiglu_dgrad");
    record_dgrad(recording, operands, d_hidden, gate_up_of(operands, gate_up), row_weight, to,
                 form);
}

void swiglu_dgrad(Recording& recording, const TensorView& d_hidden, const Quantized& gate_up,
                  const TensorView& row_weight, const SwigluGradients& to, Form form) {
    const Operands operands("fp8::swiglu_dgrad");
    record_dgrad(recording, operands, d_hidden, gate_up_of(operands, gate_up), row_weight, to,
                 form);
}

} // namespace bellows::fp8
