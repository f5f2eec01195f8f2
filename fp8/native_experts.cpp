// SPDX-License-Identifier: MIT
#include "native.hpp"
#include "operands.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/fp8/experts.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::fp8 {

namespace {

using Kernel = kernels::HopperFp8Experts;

constexpr std::uint64_t kBlock = 128; // codes that share a scale
/// Among which each workgroup looks for those of its groups.
constexpr std::uint64_t kMostSlots = 4096, kMostGroups = 256;

std::uint32_t workgroups(const Device& device) {
    constexpr std::uint32_t kUsual = 132;
    return device.info().processors != 0 ? device.info().processors : kUsual;
}

bool takes(const Quantized& q, Blocks blocks) {
    return q.recipe.format == Format::E4M3 && q.recipe.blocks == blocks;
}

std::string shape(const Quantized& q) {
    return describe(Operand(q));
}

void set_ids(Kernel& kernel, const Operands& operands, const TensorView& ids) {
    kernel.ids = ids.buffer;
    kernel.row_count = ids.row_count ? ids.row_count : ids.buffer;
    kernel.has_count = ids.row_count ? 1 : 0;
    kernel.slots = operands.u32("ids", ids.num_elements());
    kernel.top_k = operands.u32("top_k", ids.extent[1]);
}

void set_rows(Kernel& kernel, const Operands& operands, const Quantized& a) {
    kernel.a = a.codes.buffer;
    kernel.a_scales = a.scales.buffer;
    kernel.k = operands.u32("K", a.codes.extent[1]);
    kernel.lda = operands.u32("the stride of a", a.codes.stride[0]);
    kernel.ld_a_scales = operands.u32("the stride of a's scales", a.scales.stride[0]);
}

/// Weights of each group; what is shared are the same until set_shared.
void set_weights(Kernel& kernel, const Operands& operands, const Quantized& b) {
    kernel.b = kernel.shared_b = kernel.next_b = kernel.next_shared_b = b.codes.buffer;
    kernel.b_scales = kernel.shared_b_scales = b.scales.buffer;
    kernel.ldb = operands.u32("the stride of b", b.codes.stride[1]);
    kernel.stride_b = operands.u32("the stride of b", b.codes.stride[0]);
    kernel.b_scale_rows = operands.u32("the stride of b's scales", b.scales.stride[1]);
    kernel.b_scale_block = 1;
    kernel.stride_b_scales = operands.u32("the stride of b's scales", b.scales.stride[0]);
    kernel.groups = kernel.routed = operands.u32("groups", b.codes.extent[0]);
}

/// One matrix whose parts are the shared experts'. by_rows: one after the other, else side by side.
void set_shared(Kernel& kernel, const Operands& operands, const Quantized& b, std::uint64_t ffn,
                std::uint32_t shared, bool by_rows) {
    kernel.shared_b = b.codes.buffer;
    kernel.shared_b_scales = b.scales.buffer;
    const std::uint64_t ld = b.codes.stride[0], scale_rows = b.scales.stride[0];
    kernel.ld_shared = operands.u32("the stride of b", ld);
    kernel.stride_shared = operands.u32("the stride of b", by_rows ? ffn * ld : ffn);
    kernel.shared_scale_rows = operands.u32("the stride of b's scales", scale_rows);
    kernel.shared_scale_block = 1;
    kernel.stride_shared_scales = operands.u32("the stride of b's scales",
                                               by_rows ? ffn / kBlock * scale_rows : ffn / kBlock);
    kernel.groups += shared;
}

void dispatch(Recording& recording, const Kernel& kernel) {
    recording.dispatch(kernel, {workgroups(recording.device()), 1, 1});
}

/// Checks what both products have; returns the slots.
std::uint64_t check(const Recording& recording, const Operands& operands,
                    const ExpertWeights& weights, const TensorView& ids) {
    operands.require(ids.rank == 2 && ids.dtype == DType::I32 && ids.stride[1] == 1 &&
                         ids.stride[0] == ids.extent[1],
                     "ids are " + describe(ids) + ", wanted are i32 [tokens, top_k], contiguous");
    const std::uint64_t slots = ids.num_elements();
    const std::string lacking = why_not_experts(recording.device(), weights, slots);
    operands.require(lacking.empty(), lacking);
    return slots;
}

void check_rows(const Operands& operands, const char* name, const Quantized& rows,
                std::uint64_t count, std::uint64_t columns) {
    const TensorView& c = rows.codes;
    operands.require(takes(rows, Blocks::Rows128) && c.rank == 2 && c.extent[0] == count &&
                         c.extent[1] == columns && c.stride[1] == 1 && c.stride[0] % 16 == 0 &&
                         c.buffer.offset % 16 == 0,
                     std::string(name) + " is " + shape(rows) + ", wanted is e4m3 1x128 [" +
                         std::to_string(count) + ", " + std::to_string(columns) + "]");
}

} // namespace

std::string why_not_by_ids(const Product& p) {
    const GroupLayout& layout = p.rows->layout;
    return layout.rows <= kMostSlots && layout.groups <= kMostGroups
               ? ""
               : std::to_string(layout.rows) + " slots of " + std::to_string(layout.groups) +
                     " groups are too many";
}

void record_native_by_ids(Recording& recording, const char* op, const Product& p) {
    const Operands operands(op);
    const GroupLayout& layout = p.rows->layout;
    Kernel kernel;
    kernel.variant = Kernel::Variant::by_ids;
    set_ids(kernel, operands, layout.values);
    kernel.slots_per_a_row = std::max(p.rows->slots_per_a_row, 1u);
    set_rows(kernel, operands, *p.a.quantized);
    set_weights(kernel, operands, *p.b.quantized);
    kernel.n = operands.u32("N", p.d.extent[1]);
    kernel.d = kernel.d_scales = p.d.buffer;
    kernel.ldd = operands.u32("the stride of d", p.d.stride[0]);
    kernel.f32 = p.d.dtype == DType::F32 ? 1 : 0;
    kernel.accumulate = p.accumulate ? 1 : 0;
    dispatch(recording, kernel);
}

std::uint32_t ExpertWeights::shared() const {
    return shared_down ? static_cast<std::uint32_t>(shared_down->codes.extent[1] / ffn()) : 0;
}

std::string why_not_experts(const Device& device, const ExpertWeights& w, std::uint64_t slots) {
    if (const std::string lacking = why_not_native(device); !lacking.empty())
        return lacking;
    const auto fits = [](const Quantized& q, std::uint64_t rows, std::uint64_t columns) {
        const TensorView& c = q.codes;
        const std::uint64_t ld = c.stride[c.rank - 2];
        return takes(q, Blocks::Blocks128) && c.extent[c.rank - 2] == rows &&
               c.extent[c.rank - 1] == columns && c.stride[c.rank - 1] == 1 && ld % 16 == 0 &&
               c.buffer.offset % 16 == 0;
    };
    if (w.gate_up.codes.rank != 3 || w.down.codes.rank != 3 ||
        w.gate_up.codes.extent[0] != w.down.codes.extent[0] || w.ffn() == 0 ||
        w.ffn() % kBlock != 0 || w.hidden() % 8 != 0 || !fits(w.gate_up, 2 * w.ffn(), w.hidden()) ||
        !fits(w.down, w.hidden(), w.ffn()))
        return "gate_up is " + shape(w.gate_up) + ", down is " + shape(w.down) +
               "; it takes e4m3 in 128x128 blocks of multiples of 128 columns";
    if (w.shared_gate_up.has_value() != w.shared_down.has_value())
        return "one of the shared experts' matrices is missing";
    if (w.shared_down &&
        (w.shared_gate_up->codes.rank != 2 || w.shared_down->codes.rank != 2 || w.shared() == 0 ||
         !fits(*w.shared_gate_up, 2 * w.shared() * w.ffn(), w.hidden()) ||
         !fits(*w.shared_down, w.hidden(), w.shared() * w.ffn())))
        return "shared gate_up is " + shape(*w.shared_gate_up) + ", down is " +
               shape(*w.shared_down) + ", wanted are multiples of " + std::to_string(w.ffn());
    return slots <= kMostSlots && w.experts() + w.shared() <= kMostGroups
               ? ""
               : std::to_string(slots) + " slots of " + std::to_string(w.experts() + w.shared()) +
                     " experts are too many";
}

void experts_hidden(Recording& recording, const Quantized& x, const ExpertWeights& weights,
                    const TensorView& ids, const Quantized& hidden, bool rounded) {
    const Operands operands("fp8::experts_hidden");
    const std::uint64_t slots = check(recording, operands, weights, ids);
    check_rows(operands, "x", x, ids.extent[0], weights.hidden());
    check_rows(operands, "hidden", hidden, slots, weights.ffn());
    if (slots == 0)
        return;
    Kernel kernel;
    kernel.variant = Kernel::Variant::swiglu;
    set_ids(kernel, operands, ids);
    kernel.slots_per_a_row = kernel.top_k;
    set_rows(kernel, operands, x);
    set_weights(kernel, operands, weights.gate_up);
    kernel.n = kernel.b_up = operands.u32("ffn", weights.ffn());
    if (const std::uint32_t shared = weights.shared(); shared != 0) {
        set_shared(kernel, operands, *weights.shared_gate_up, weights.ffn(), shared, true);
        kernel.shared_up = kernel.n * shared;
    }
    kernel.next_b = kernel.next_shared_b = weights.down.codes.buffer;
    kernel.next_ld = operands.u32("the stride of down", weights.down.codes.stride[1]);
    kernel.next_stride = operands.u32("the stride of down", weights.down.codes.stride[0]);
    if (weights.shared_down) {
        kernel.next_shared_b = weights.shared_down->codes.buffer;
        kernel.next_shared_ld =
            operands.u32("the stride of down", weights.shared_down->codes.stride[0]);
    }
    kernel.d = hidden.codes.buffer;
    kernel.d_scales = hidden.scales.buffer;
    kernel.ldd = operands.u32("the stride of hidden", hidden.codes.stride[0]);
    kernel.ld_d_scales = operands.u32("the stride of hidden's scales", hidden.scales.stride[0]);
    kernel.f32 = rounded ? 0 : 1;
    kernel.powers = hidden.recipe.rule == ScaleRule::PowerOfTwo ? 1 : 0;
    dispatch(recording, kernel);
}

void experts_results(Recording& recording, const Quantized& hidden, const ExpertWeights& weights,
                     const TensorView& ids, const TensorView& results) {
    const Operands operands("fp8::experts_results");
    const std::uint64_t slots = check(recording, operands, weights, ids);
    check_rows(operands, "hidden", hidden, slots, weights.ffn());
    operands.require(results.rank == 2 && results.extent[0] == slots &&
                         results.extent[1] == weights.hidden() && results.stride[1] == 1 &&
                         results.stride[0] % 8 == 0 && results.buffer.offset % 16 == 0 &&
                         (results.dtype == DType::F32 || results.dtype == DType::BF16),
                     "results are " + describe(results) + ", wanted are f32 or bf16 [" +
                         std::to_string(slots) + ", " + std::to_string(weights.hidden()) + "]");
    if (slots == 0)
        return;
    Kernel kernel;
    kernel.variant = Kernel::Variant::by_ids;
    set_ids(kernel, operands, ids);
    kernel.slots_per_a_row = 1;
    set_rows(kernel, operands, hidden);
    set_weights(kernel, operands, weights.down);
    if (const std::uint32_t shared = weights.shared(); shared != 0)
        set_shared(kernel, operands, *weights.shared_down, weights.ffn(), shared, false);
    kernel.n = operands.u32("N", weights.hidden());
    kernel.d = kernel.d_scales = results.buffer;
    kernel.ldd = operands.u32("the stride of results", results.stride[0]);
    kernel.f32 = results.dtype == DType::F32 ? 1 : 0;
    dispatch(recording, kernel);
}

} // namespace bellows::fp8
