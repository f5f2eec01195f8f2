// SPDX-License-Identifier: MIT
#include "arguments.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/elementwise.hpp>
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

namespace {

/// A matrix as a batch of one.
TensorView batch_of(const TensorView& view) {
    TensorView batch = view;
    if (view.rank == 2) {
        batch.rank = 3;
        batch.extent = {1, view.extent[0], view.extent[1], 0};
        batch.stride = {0, view.stride[0], view.stride[1], 0};
    }
    return batch;
}

} // namespace

void transpose(Recording& recording, const TensorView& from, const TensorView& to) {
    const Arguments arguments("transpose");
    const std::uint64_t element = size_of(from.dtype);
    arguments.require((from.rank == 2 || from.rank == 3) && to.rank == from.rank,
                      "from " + describe(from) + " to " + describe(to) +
                          ": wanted are two or three dimensions");
    arguments.require(element == 2 || element == 4,
                      "x is " + describe(from) + ", wanted are elements of two or four bytes");
    const TensorView x = batch_of(from), y = batch_of(to);
    const std::uint64_t batch = x.extent[0], rows = x.extent[1], columns = x.extent[2];
    arguments.strided("x", x, x.dtype, {batch, rows, columns});
    arguments.strided("y", y, x.dtype, {batch, columns, rows});
    const std::uint32_t rows4 = arguments.groups_of_4("rows", rows),
                        columns4 = arguments.groups_of_4("columns", columns);
    if (x.num_elements() == 0)
        return;
    const bool cpu = recording.device().info().is_cpu;
    const std::uint32_t local_size = cpu ? 8 : 64, lanes_x = cpu ? 2 : 8;
    const std::uint64_t tiles =
        div_up(columns4, lanes_x) * div_up(rows4, std::uint64_t{local_size / lanes_x});
    const std::uint64_t most = std::max<std::uint64_t>(
        kKernelReach / element /
            std::max({x.stride[0], y.stride[0], rows * columns, std::uint64_t{1}}),
        1);
    for (std::uint64_t first = 0; first < batch; first += most) {
        const std::uint64_t count = std::min(most, batch - first);
        const auto stride = [&](const char* what, const TensorView& of, std::uint32_t dimension) {
            return arguments.groups_of_4(what, of.stride[dimension]);
        };
        recording.dispatch(
            kernels::Transpose{.variant = element == 2 ? kernels::Transpose::Variant::bf16
                                                       : kernels::Transpose::Variant::f32,
                               .constants = {.local_size = local_size, .lanes_x = lanes_x},
                               .x = arguments.memory("x", slice(x, 0, first, count)),
                               .y = arguments.memory("y", slice(y, 0, first, count)),
                               .batch = arguments.u32("matrices", count),
                               .rows4 = rows4,
                               .columns4 = columns4,
                               .x_batch4 = stride("x's stride", x, 0),
                               .x_row4 = stride("x's stride", x, 1),
                               .y_batch4 = stride("y's stride", y, 0),
                               .y_row4 = stride("y's stride", y, 1)},
            {static_cast<std::uint32_t>(std::min<std::uint64_t>(tiles * count, kMaxGroups))});
    }
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
