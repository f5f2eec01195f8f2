// SPDX-License-Identifier: MIT
#include "arguments.hpp"

#include "engine/runtime/driver_defects.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/device.hpp>

#include <algorithm>
#include <limits>

namespace bellows::ops {

namespace {

std::string list(const std::uint64_t* values, std::size_t count) {
    std::string text = "[";
    for (std::size_t i = 0; i < count; ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
    }
    return text + "]";
}

} // namespace

std::string describe(const TensorView& view) {
    std::string text =
        std::string(to_string(view.dtype)) + " " + list(view.extent.data(), view.rank);
    if (!view.is_contiguous()) {
        text += " with strides " + list(view.stride.data(), view.rank);
    }
    return text;
}

void Arguments::fail(const std::string& message) const {
    throw Error(ErrorCode::InvalidArgument, std::string(op_) + ": " + message);
}

void Arguments::same(const char* name, const TensorView& view, DType dtype,
                     std::initializer_list<std::uint64_t> extents) const {
    const bool fits = view.dtype == dtype && view.rank == extents.size() &&
                      std::equal(extents.begin(), extents.end(), view.extent.begin());
    require(fits, std::string(name) + " is " + describe(view) + ", wanted is " + to_string(dtype) +
                      " " + list(extents.begin(), extents.size()));
}

void Arguments::tensor(const char* name, const TensorView& view, DType dtype,
                       std::initializer_list<std::uint64_t> extents) const {
    same(name, view, dtype, extents);
    contiguous(name, view);
}

void Arguments::strided(const char* name, const TensorView& view, DType dtype,
                        std::initializer_list<std::uint64_t> extents) const {
    same(name, view, dtype, extents);
    require(view.extent[view.rank - 1] <= 1 || view.stride[view.rank - 1] == 1,
            std::string(name) + " is " + describe(view) + "; its last stride must be 1");
    for (std::uint32_t i = 0; i + 1 < view.rank; ++i) {
        require(view.stride[i] % 4 == 0, std::string(name) + " is " + describe(view) +
                                             "; its outer strides must be multiples of 4");
    }
}

void Arguments::rank(const char* name, const TensorView& view, std::uint32_t rank) const {
    require(view.rank == rank, std::string(name) + " is " + describe(view) + ", wanted are " +
                                   std::to_string(rank) + " dimensions");
}

void Arguments::activation(const char* name, const TensorView& view) const {
    require(view.dtype == DType::F32 || view.dtype == DType::BF16,
            std::string(name) + " is " + describe(view) + ", wanted is f32 or bf16");
}

void Arguments::contiguous(const char* name, const TensorView& view) const {
    require(view.is_contiguous(),
            std::string(name) + " is " + describe(view) + "; it must be contiguous");
}

void Arguments::flat(const char* name, const TensorView& view, std::uint64_t elements) const {
    contiguous(name, view);
    require(view.num_elements() == elements, std::string(name) + " is " + describe(view) +
                                                 ", wanted are " + std::to_string(elements) +
                                                 " elements");
}

void Arguments::multiple_of_4(const char* what, std::uint64_t value) const {
    require(value % 4 == 0,
            std::string(what) + " is " + std::to_string(value) + ", not a multiple of 4");
}

void Arguments::workspace(BufferView workspace, std::uint64_t bytes) const {
    require(workspace.bytes >= bytes, "the workspace has " + std::to_string(workspace.bytes) +
                                          " bytes, needed are " + std::to_string(bytes));
    require(workspace.offset % 16 == 0, "the workspace begins at byte " +
                                            std::to_string(workspace.offset) +
                                            ", not at a multiple of 16");
}

std::uint32_t Arguments::u32(const char* what, std::uint64_t value) const {
    if (value > std::numeric_limits<std::uint32_t>::max()) // a plan asks for thousands of numbers
        fail(std::string(what) + " is " + std::to_string(value) + ", more than 2^32 - 1");
    return static_cast<std::uint32_t>(value);
}

std::uint32_t Arguments::groups_of_4(const char* what, std::uint64_t value) const {
    multiple_of_4(what, value);
    return u32(what, value / 4);
}

BufferView Arguments::memory(const char* name, const TensorView& view, std::uint64_t group) const {
    require(static_cast<bool>(view.buffer), std::string(name) + " has no memory");
    std::uint64_t elements = view.num_elements() == 0 ? 0 : 1;
    for (std::uint32_t i = 0; i < view.rank && elements > 0; ++i) {
        elements += (view.extent[i] - 1) * view.stride[i];
    }
    const std::uint64_t bytes = elements * size_of(view.dtype);
    const std::uint64_t alignment = std::max<std::uint64_t>(group * size_of(view.dtype), 4);
    require(view.buffer.offset % alignment == 0,
            std::string(name) + " begins at byte " + std::to_string(view.buffer.offset) +
                " of its buffer, not at a multiple of " + std::to_string(alignment));
    // What has a row count is mostly less than its extents say.
    require(view.row_count || bytes <= kKernelReach,
            std::string(name) + " is " + describe(view) +
                ", too large for one kernel, which reaches 4 GiB of it");
    require(elements / group <= std::numeric_limits<std::uint32_t>::max(),
            std::string(name) + " is " + describe(view) + ", too large for one kernel");
    require(bytes <= view.buffer.bytes,
            std::string(name) + " is " + describe(view) + " and needs " + std::to_string(bytes) +
                " bytes, its buffer view has " + std::to_string(view.buffer.bytes));
    return view.buffer.sub(0, bytes);
}

BufferView Arguments::memory_or(const char* name, const TensorView& view, BufferView otherwise,
                                std::uint64_t group) const {
    return view.buffer ? memory(name, view, group) : otherwise;
}

BufferView Arguments::row_count_or(const TensorView& view, BufferView otherwise) const {
    require(view.rows_per_count == 0, "one row count is taken, not one for each " +
                                          std::to_string(view.rows_per_count) + " rows");
    return view.row_counts_or(otherwise);
}

bool shares_loads(const DeviceInfo& info) {
    return info.is_cpu && info.subgroup_size == 8 && detail::mesa_version(info).value_or(26) < 26;
}

RowPlan plan_rows(const Recording& recording, std::uint64_t rows, std::uint64_t columns4,
                  RowWork work) {
    RowPlan plan;
    if (recording.device().info().is_cpu) {
        // Barriers are slow there, workgroups of one subgroup are not; few rows are shared out by
        // columns so that every core gets some.
        const bool by_columns = work == RowWork::WholeWorkgroup ||
                                (work == RowWork::Elementwise && rows < 64 && columns4 >= 8);
        plan.local_size = 8;
        plan.row_per_workgroup = by_columns ? 1 : 0;
    } else {
        plan.local_size = columns4 >= 96 ? 128 : (columns4 >= 48 ? 64 : 32);
        plan.row_per_workgroup = 1;
    }
    plan.groups.x = row_groups(plan, rows);
    return plan;
}

std::uint32_t row_groups(const RowPlan& plan, std::uint64_t rows) {
    const std::uint64_t groups = plan.row_per_workgroup != 0 ? rows : div_up(rows, plan.local_size);
    return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(groups, 1, kMaxGroups));
}

std::uint32_t fours_at_once(std::initializer_list<TensorView> views) {
    for (const TensorView& view : views) {
        const auto rows_in_eights =
            std::all_of(view.stride.begin(), view.stride.begin() + (view.rank - 1),
                        [](std::uint64_t stride) { return stride % 8 == 0; });
        if (view.dtype != DType::BF16 || view.extent[view.rank - 1] % 8 != 0 || !rows_in_eights ||
            view.buffer.offset % 16 != 0)
            return 1;
    }
    return 2;
}

FlatPlan plan_flat(const Recording& recording, std::uint64_t items, std::uint64_t per_invocation) {
    FlatPlan plan;
    const bool cpu = recording.device().info().is_cpu;
    plan.local_size = cpu ? 8 : 128;
    const std::uint64_t per_group = plan.local_size * (cpu ? per_invocation : 1);
    plan.groups.x = static_cast<std::uint32_t>(
        std::clamp<std::uint64_t>(div_up(items, per_group), 1, cpu ? kMaxGroups : 16384));
    return plan;
}

RunPlan plan_runs(const Recording& recording, std::uint64_t elements) {
    RunPlan plan;
    if (!recording.device().info().is_cpu) {
        plan.local_size = 128;
        plan.run = 4;
    }
    const std::uint64_t groups = div_up(div_up(elements, 4), plan.local_size * plan.run);
    plan.groups.x = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(groups, 1, kMaxGroups));
    return plan;
}

FlatPlan plan_exact(const Recording& recording, std::uint64_t items) {
    FlatPlan plan;
    plan.local_size = recording.device().info().is_cpu ? 8 : 64;
    const std::uint64_t groups = div_up(items, plan.local_size);
    if (groups > recording.device().info().max_workgroup_count[0]) {
        throw Error(ErrorCode::InvalidArgument,
                    std::to_string(items) + " items need " + std::to_string(groups) +
                        " workgroups, more than this device can start at once");
    }
    plan.groups.x = static_cast<std::uint32_t>(groups);
    return plan;
}

} // namespace bellows::ops
