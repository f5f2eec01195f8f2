// SPDX-License-Identifier: MIT
#include "ops_check.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::ops {

void scale(Recording& recording, const TensorView& x, const TensorView& y, float alpha) {
    add(recording, x, {}, y, alpha, 0);
}

void add(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& y,
         float alpha, float beta) {
    const Arguments arguments(b.buffer ? "add" : "scale");
    const std::uint64_t elements = a.num_elements();
    arguments.activation("the first operand", a);
    arguments.flat("the first operand", a, elements);
    arguments.flat("y", y, elements);
    arguments.require(y.dtype == a.dtype && (!b.buffer || b.dtype == a.dtype),
                      "operands of different types: " + describe(a) + " and " + describe(y));
    if (b.buffer) {
        arguments.flat("b", b, elements);
    }
    in_parts(elements, [&](const auto& part) {
        const std::uint64_t count = part(a).num_elements();
        const RunPlan plan = plan_runs(recording, count);
        const BufferView a_memory = arguments.memory("the first operand", part(a));
        recording.dispatch(
            kernels::ScaleAdd{.variant = storage_variant<kernels::ScaleAdd>(a.dtype),
                              .constants = {.local_size = plan.local_size, .run = plan.run},
                              .a = a_memory,
                              .b = arguments.memory_or("b", part(b), a_memory),
                              .y = arguments.memory("y", part(y)),
                              .count4 = arguments.u32("elements / 4", count / 4),
                              .tail = static_cast<std::uint32_t>(count % 4),
                              .has_b = b.buffer ? 1u : 0u,
                              .alpha = alpha,
                              .beta = beta},
            plan.groups);
    });
}

void copy_bytes(Recording& recording, BufferView source, BufferView destination) {
    const Arguments arguments("copy_bytes");
    arguments.require(source && destination && source.bytes == destination.bytes,
                      "there is no source or no destination, or their sizes differ");
    constexpr std::uint64_t kUnit = 16;
    arguments.require((source.bytes | source.offset | destination.offset) % kUnit == 0,
                      "sizes and offsets must be multiples of 16 bytes");
    for (std::uint64_t first = 0; first < source.bytes; first += kKernelReach) {
        const std::uint64_t bytes = std::min(source.bytes - first, kKernelReach);
        const FlatPlan plan = plan_flat(recording, div_up(bytes / kUnit, 4), 16);
        recording.dispatch(kernels::CopyUnits{.constants = {.local_size = plan.local_size},
                                              .source = source.sub(first, bytes),
                                              .destination = destination.sub(first, bytes),
                                              .units = arguments.u32("units", bytes / kUnit)},
                           plan.groups);
    }
}

void cast(Recording& recording, const TensorView& x, const TensorView& y) {
    const Arguments arguments("cast");
    const std::uint64_t elements = x.num_elements();
    arguments.activation("x", x);
    arguments.activation("y", y);
    arguments.flat("x", x, elements);
    arguments.flat("y", y, elements);
    if (x.dtype == y.dtype) {
        scale(recording, x, y, 1);
        return;
    }
    using Variant = kernels::Cast::Variant;
    in_parts(elements, [&](const auto& part) {
        const std::uint64_t count = part(x).num_elements();
        const RunPlan plan = plan_runs(recording, count);
        recording.dispatch(
            kernels::Cast{.variant = y.dtype == DType::BF16 ? Variant::f32_bf16 : Variant::bf16_f32,
                          .constants = {.local_size = plan.local_size, .run = plan.run},
                          .x = arguments.memory("x", part(x)),
                          .y = arguments.memory("y", part(y)),
                          .count4 = arguments.u32("elements / 4", count / 4),
                          .tail = static_cast<std::uint32_t>(count % 4)},
            plan.groups);
    });
}

void add_rows(Recording& recording, const Arguments& arguments, BufferView x, std::uint64_t rows,
              std::uint64_t columns, BufferView sums, bool accumulate) {
    const std::uint32_t columns4 = arguments.groups_of_4("columns", columns);
    const FlatPlan plan = plan_exact(recording, columns4);
    recording.dispatch(kernels::ColumnSum{.constants = {.local_size = plan.local_size},
                                          .x = x,
                                          .sums = sums,
                                          .rows = arguments.u32("rows", rows),
                                          .columns4 = columns4,
                                          .accumulate = accumulate ? 1u : 0u},
                       plan.groups);
}

} // namespace bellows::ops
