// SPDX-License-Identifier: MIT
#include "norm_variant.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/norm.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::ops {

namespace {

void check_rows(const Arguments& arguments, const char* name, const TensorView& view,
                const TensorView& x, const TensorView& inv_rms) {
    arguments.rank("x", x, 2);
    arguments.require(x.extent[1] > 0, "there are no columns");
    arguments.multiple_of_4("columns", x.extent[1]);
    arguments.strided("x", x, x.dtype, {x.extent[0], x.extent[1]});
    arguments.strided(name, view, x.dtype, {x.extent[0], x.extent[1]});
    arguments.tensor("inv_rms", inv_rms, DType::F32, {x.extent[0]});
}

} // namespace

void rmsnorm_forward(Recording& recording, const TensorView& x, const TensorView& gain,
                     const TensorView& y, const TensorView& inv_rms, float eps) {
    const Arguments arguments("rmsnorm_forward");
    check_rows(arguments, "y", y, x, inv_rms);
    const auto variant = norm_variant<kernels::RmsnormForward>(arguments, x, gain, x.extent[1]);
    if (x.extent[0] == 0) {
        return;
    }
    const RowPlan plan = plan_rows(recording, x.extent[0], x.extent[1] / 4, RowWork::Reduction);
    recording.dispatch(
        kernels::RmsnormForward{.variant = variant,
                                .constants = {plan.local_size, plan.row_per_workgroup},
                                .x = arguments.memory("x", x),
                                .gain = arguments.memory("gain", gain),
                                .y = arguments.memory("y", y),
                                .inv_rms = arguments.memory("inv_rms", inv_rms, 1),
                                .rows = arguments.u32("rows", x.extent[0]),
                                .columns4 = arguments.groups_of_4("columns", x.extent[1]),
                                .x_stride4 = arguments.groups_of_4("x's row stride", x.stride[0]),
                                .y_stride4 = arguments.groups_of_4("y's row stride", y.stride[0]),
                                .eps = eps},
        plan.groups);
}

void rmsnorm_dgrad(Recording& recording, const TensorView& dy, const TensorView& x,
                   const TensorView& gain, const TensorView& inv_rms, const TensorView& dx,
                   bool accumulate) {
    const Arguments arguments("rmsnorm_dgrad");
    check_rows(arguments, "dy", dy, x, inv_rms);
    check_rows(arguments, "dx", dx, x, inv_rms);
    const auto variant = norm_variant<kernels::RmsnormDgrad>(arguments, x, gain, x.extent[1]);
    if (x.extent[0] == 0) {
        return;
    }
    const RowPlan plan = plan_rows(recording, x.extent[0], x.extent[1] / 4, RowWork::Reduction);
    recording.dispatch(
        kernels::RmsnormDgrad{.variant = variant,
                              .constants = {plan.local_size, plan.row_per_workgroup},
                              .dy = arguments.memory("dy", dy),
                              .x = arguments.memory("x", x),
                              .gain = arguments.memory("gain", gain),
                              .inv_rms = arguments.memory("inv_rms", inv_rms, 1),
                              .dx = arguments.memory("dx", dx),
                              .rows = arguments.u32("rows", x.extent[0]),
                              .columns4 = arguments.groups_of_4("columns", x.extent[1]),
                              .dy_stride4 = arguments.groups_of_4("dy's row stride", dy.stride[0]),
                              .x_stride4 = arguments.groups_of_4("x's row stride", x.stride[0]),
                              .dx_stride4 = arguments.groups_of_4("dx's row stride", dx.stride[0]),
                              .accumulate = accumulate ? 1u : 0u},
        plan.groups);
}

void rmsnorm_wgrad(Recording& recording, const TensorView& dy, const TensorView& x,
                   const TensorView& inv_rms, const TensorView& d_gain, bool accumulate,
                   BufferView workspace) {
    const Arguments arguments("rmsnorm_wgrad");
    check_rows(arguments, "dy", dy, x, inv_rms);
    arguments.activation("x", x);
    const std::uint64_t rows = x.extent[0], columns = x.extent[1];
    arguments.tensor("d_gain", d_gain, DType::F32, {columns});
    arguments.workspace(workspace, rmsnorm_wgrad_workspace_bytes(rows, columns));
    const BufferView d_gain_memory = arguments.memory("d_gain", d_gain);
    if (rows == 0) {
        if (!accumulate) {
            recording.fill(d_gain_memory, 0);
        }
        return;
    }
    const std::uint64_t chunks = div_up(rows, kRmsnormWgradRows);
    const std::uint32_t columns4 = arguments.groups_of_4("columns", columns);
    const BufferView partials = workspace.sub(0, rmsnorm_wgrad_workspace_bytes(rows, columns));
    const FlatPlan by_chunk = plan_exact(recording, chunks * columns4);
    recording.dispatch(
        kernels::RmsnormWgrad{.variant = storage_variant<kernels::RmsnormWgrad>(x.dtype),
                              .constants = {.local_size = by_chunk.local_size},
                              .dy = arguments.memory("dy", dy),
                              .x = arguments.memory("x", x),
                              .inv_rms = arguments.memory("inv_rms", inv_rms, 1),
                              .partials = partials,
                              .rows = arguments.u32("rows", rows),
                              .columns4 = columns4,
                              .dy_stride4 = arguments.groups_of_4("dy's row stride", dy.stride[0]),
                              .x_stride4 = arguments.groups_of_4("x's row stride", x.stride[0]),
                              .chunk_rows = kRmsnormWgradRows},
        by_chunk.groups);
    add_rows(recording, arguments, partials, chunks, columns, d_gain_memory, accumulate);
}

} // namespace bellows::ops
