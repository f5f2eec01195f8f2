// SPDX-License-Identifier: MIT
// Reductions over whole tensors, the gradient norm and AdamW.
#include "arguments.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/optimizer.hpp>
#include <bellows/kernels/kernels.hpp>

#include <cmath>

namespace bellows::ops {

namespace {

void partials_of(const char* op, Recording& recording, const TensorView& x,
                 const TensorView& partials, bool square) {
    const Arguments arguments(op);
    const std::uint64_t elements = x.num_elements();
    arguments.activation("x", x);
    arguments.flat("x", x, elements);
    arguments.tensor("partials", partials, DType::F32, {num_partials(elements)});
    std::uint64_t done = 0; // of the partials, whose elements no part divides
    in_parts(elements, [&](const auto& part) {
        const std::uint64_t count = part(x).num_elements(), parts = num_partials(count);
        const RowPlan plan = plan_rows(recording, parts, kPartialElements / 4, RowWork::Reduction);
        recording.dispatch(
            kernels::SumPartials{.variant = storage_variant<kernels::SumPartials>(x.dtype),
                                 .constants = {plan.local_size, plan.row_per_workgroup},
                                 .x = arguments.memory("x", part(x)),
                                 .partials =
                                     arguments.memory("partials", partials.rows(done, parts), 1),
                                 .count4 = arguments.u32("elements / 4", count / 4),
                                 .tail = static_cast<std::uint32_t>(count % 4),
                                 .chunk4 = kPartialElements / 4,
                                 .square = square ? 1u : 0u},
            plan.groups);
        done += parts;
    });
}

} // namespace

void sum_partials(Recording& recording, const TensorView& x, const TensorView& partials) {
    partials_of("sum_partials", recording, x, partials, false);
}

void sum_squares_partials(Recording& recording, const TensorView& x, const TensorView& partials) {
    partials_of("sum_squares_partials", recording, x, partials, true);
}

void sum_pairs(Recording& recording, const TensorView& values, const TensorView& result,
               BufferView workspace) {
    const Arguments arguments("sum_pairs");
    arguments.rank("values", values, 1);
    std::uint64_t count = values.extent[0];
    arguments.tensor("values", values, DType::F32, {count});
    arguments.tensor("result", result, DType::F32, {2});
    arguments.workspace(workspace, sum_pairs_workspace_bytes(count));
    const BufferView result_memory = arguments.memory("result", result, 1);
    if (count == 0) {
        recording.fill(result_memory, 0);
        return;
    }
    BufferView from = arguments.memory("values", values, 1);
    std::uint64_t used = 0;
    bool pairs = false;
    do {
        const std::uint64_t sums = div_up(count, kPairChunk);
        const BufferView to = sums == 1 ? result_memory : workspace.sub(used, 8 * sums);
        const FlatPlan plan = plan_exact(recording, sums);
        recording.dispatch(kernels::SumPairs{.constants = {.local_size = plan.local_size},
                                             .values = from,
                                             .sums = to,
                                             .count = arguments.u32("values", count),
                                             .chunk = kPairChunk,
                                             .input_is_pairs = pairs ? 1u : 0u},
                           plan.groups);
        used += 8 * sums;
        from = to;
        count = sums;
        pairs = true;
    } while (count > 1);
}

void clip_coefficient(Recording& recording, const TensorView& sum_squares, const TensorView& result,
                      float max_norm) {
    const Arguments arguments("clip_coefficient");
    arguments.tensor("sum_squares", sum_squares, DType::F32, {2});
    arguments.tensor("result", result, DType::F32, {2});
    arguments.require(max_norm >= 0, "max_norm is " + std::to_string(max_norm));
    const FlatPlan plan = plan_exact(recording, 1);
    recording.dispatch(
        kernels::ClipCoefficient{.constants = {.local_size = plan.local_size},
                                 .sum_squares = arguments.memory("sum_squares", sum_squares, 1),
                                 .result = arguments.memory("result", result, 1),
                                 .max_norm = max_norm},
        plan.groups);
}

std::array<float, 3> adamw_scalars(const AdamwOptions& options, double lr, std::uint64_t step) {
    const double t = static_cast<double>(step);
    const double bias1 = 1.0 / (1.0 - std::pow(static_cast<double>(options.beta1), t));
    const double bias2 = 1.0 / (1.0 - std::pow(static_cast<double>(options.beta2), t));
    return {static_cast<float>(lr), static_cast<float>(bias1), static_cast<float>(bias2)};
}

void adamw(Recording& recording, const TensorView& weight, const TensorView& gradient,
           const TensorView& m, const TensorView& v, const TensorView& weight_copy,
           const TensorView& scalars, const TensorView& clip, const AdamwOptions& options) {
    const Arguments arguments("adamw");
    const std::uint64_t elements = weight.num_elements();
    arguments.activation("m", m);
    const auto check = [&](const char* name, const TensorView& view, DType dtype) {
        arguments.flat(name, view, elements);
        arguments.require(view.dtype == dtype, std::string(name) + " is " + describe(view) +
                                                   ", wanted is " + to_string(dtype));
    };
    check("weight", weight, DType::F32);
    check("gradient", gradient, DType::F32);
    check("m", m, m.dtype);
    check("v", v, m.dtype);
    if (weight_copy.buffer) {
        check("weight_copy", weight_copy, DType::BF16);
    }
    arguments.tensor("scalars", scalars, DType::F32, {3});
    const BufferView scalars_memory = arguments.memory("scalars", scalars, 1);
    in_parts(elements, [&](const auto& part) {
        const std::uint64_t count = part(weight).num_elements();
        const RunPlan plan = plan_runs(recording, count);
        const BufferView m_memory = arguments.memory("m", part(m));
        recording.dispatch(
            kernels::Adamw{.variant = storage_variant<kernels::Adamw>(m.dtype),
                           .constants = {.local_size = plan.local_size, .run = plan.run},
                           .weight = arguments.memory("weight", part(weight)),
                           .gradient = arguments.memory("gradient", part(gradient)),
                           .m = m_memory,
                           .v = arguments.memory("v", part(v)),
                           .weight_copy =
                               arguments.memory_or("weight_copy", part(weight_copy), m_memory),
                           .scalars = scalars_memory,
                           .clip = arguments.memory_or("clip", clip, scalars_memory, 1),
                           .count4 = arguments.u32("elements / 4", count / 4),
                           .tail = static_cast<std::uint32_t>(count % 4),
                           .has_copy = weight_copy.buffer ? 1u : 0u,
                           .has_clip = clip.buffer ? 1u : 0u,
                           .beta1 = options.beta1,
                           .beta2 = options.beta2,
                           .eps = options.eps,
                           .weight_decay = options.weight_decay},
            plan.groups);
    });
}

} // namespace bellows::ops
