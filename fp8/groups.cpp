// SPDX-License-Identifier: MIT
#include <bellows/fp8/groups.hpp>

#include "launch.hpp"
#include "listed.hpp"
#include "operands.hpp"

#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::fp8 {

namespace {

using Form = GroupLayout::Form;

const char* name_of(Form form) {
    switch (form) {
    case Form::PrefixSums:
        return "prefix sums";
    case Form::AlignedEnds:
        return "aligned ends";
    case Form::RowGroups:
        return "groups of rows";
    case Form::Ids:
        return "ids";
    case Form::Masked:
        break;
    }
    return "masked";
}

GroupLayout layout_of(Form form, const TensorView& values, std::uint64_t groups, std::uint64_t rows,
                      std::uint64_t spacing) {
    const Operands operands("fp8::GroupLayout");
    const bool word = values.dtype == DType::U32 || values.dtype == DType::I32;
    operands.require(values.rank == 1 && word && values.is_contiguous() &&
                         values.buffer.offset % 4 == 0 &&
                         (form != Form::RowGroups || values.dtype == DType::I32) &&
                         (form != Form::PrefixSums || values.dtype == DType::U32),
                     std::string(name_of(form)) + " are " + describe(values) +
                         ", wanted is a contiguous vector at a multiple of 4 bytes, " +
                         (form == Form::RowGroups    ? "i32 [rows]"
                          : form == Form::PrefixSums ? "u32 [groups + 1]"
                                                     : "u32 or i32 [groups]"));
    operands.require(groups >= 1, std::string(name_of(form)) + " are " + describe(values) +
                                      ", there must be at least one group");
    operands.u32("groups", groups);
    operands.u32("rows", rows);
    return {form, values, groups, rows, spacing, 0};
}

/// Begins and ends that prefix sums have already.
std::uint64_t ranges_bytes(const GroupLayout& layout) {
    return layout.form == Form::PrefixSums ? 0 : 2 * round_up(4 * layout.groups, 256);
}

/// Where the ranges stand: of prefix sums these themselves.
ops::GroupRanges place_ranges(const GroupLayout& layout, BufferView memory) {
    if (layout.form == Form::PrefixSums)
        return ops::group_ranges(layout.values);
    const std::uint64_t half = memory.bytes / 2;
    return {TensorView::contiguous(memory.sub(0, half), DType::U32, {layout.groups}),
            TensorView::contiguous(memory.sub(half, half), DType::U32, {layout.groups})};
}

/// From each row's group.
void make_ranges(Recording& recording, const Operands& operands, const GroupLayout& layout,
                 const ops::GroupRanges& ranges, BufferView memory) {
    recording.fill(memory, 0);
    if (layout.rows == 0)
        return;
    kernels::GroupRanges kernel{.source = layout.values.buffer.sub(0, layout.values.num_bytes()),
                                .begins = ranges.begins.buffer,
                                .ends = ranges.ends.buffer,
                                .groups = operands.u32("groups", layout.groups),
                                .rows = operands.u32("rows", layout.rows)};
    recording.dispatch(kernel, {clamp_groups(div_up(layout.rows, kernel.constants.local_size))});
}

using Columns = std::array<std::uint64_t, ops::GroupTiles::kMaxShapes>;

/// With the rows' own grid, see dequantize_groups.
Columns with_rows(Columns columns) {
    columns[0] = std::max<std::uint64_t>(columns[0], 1);
    return columns;
}

} // namespace

GroupLayout GroupLayout::prefix_sums(const TensorView& offsets, std::uint64_t rows) {
    const std::uint64_t entries = offsets.extent[0];
    return layout_of(Form::PrefixSums, offsets, entries == 0 ? 0 : entries - 1, rows, 0);
}

GroupLayout GroupLayout::aligned_ends(const TensorView& ends, std::uint64_t alignment,
                                      std::uint64_t rows) {
    Operands("fp8::GroupLayout").require(alignment >= 1, "the alignment of groups is 0 rows");
    return layout_of(Form::AlignedEnds, ends, ends.extent[0], rows, alignment);
}

GroupLayout GroupLayout::row_groups(const TensorView& ids, std::uint64_t groups) {
    return layout_of(Form::RowGroups, ids, groups, ids.extent[0], 0);
}

GroupLayout GroupLayout::masked(const TensorView& counts, std::uint64_t max_rows) {
    return layout_of(Form::Masked, counts, counts.extent[0], counts.extent[0] * max_rows, max_rows);
}

GroupLayout GroupLayout::by_ids(const TensorView& topk_ids, std::uint64_t groups) {
    const Operands operands("fp8::GroupLayout");
    operands.require(topk_ids.rank == 2 && topk_ids.dtype == DType::I32 &&
                         topk_ids.is_contiguous() && topk_ids.buffer.offset % 4 == 0,
                     "ids are " + describe(topk_ids) +
                         ", wanted is a contiguous i32 [tokens, top_k] at a multiple of 4 bytes");
    operands.require(groups >= 1, "there must be at least one group");
    operands.u32("groups", groups);
    const std::uint64_t rows = topk_ids.extent[0] * topk_ids.extent[1];
    operands.u32("rows", rows);
    return {Form::Ids, topk_ids, groups, rows, 0, div_up(rows, groups)};
}

std::string describe(const GroupLayout& layout) {
    return std::to_string(layout.groups) + " groups in " + std::to_string(layout.rows) + " rows (" +
           name_of(layout.form) + ")";
}

std::uint32_t m_alignment(const Device& device) noexcept {
    return group_tile_rows(device.info());
}

GroupedRows unlisted_rows(const GroupLayout& layout) {
    GroupedRows rows{layout, {}};
    if (layout.form == GroupLayout::Form::Ids)
        rows.slots_per_a_row = static_cast<std::uint32_t>(layout.values.extent[1]);
    return rows;
}

std::uint64_t grouped_rows_bytes(const Device& device, const GroupLayout& layout) {
    return ranges_bytes(layout) + ops::group_tiles_bytes(device, layout.rows, layout.groups);
}

GroupedRows make_grouped_rows(Recording& recording, const GroupLayout& layout,
                              const std::array<std::uint64_t, ops::GroupTiles::kMaxShapes>& columns,
                              BufferView memory) {
    const Operands operands("fp8::make_grouped_rows");
    operands.require(layout.form != GroupLayout::Form::Ids,
                     describe(layout) +
                         ": rows by ids stand anywhere; give the place of ops::moe_layout's "
                         "result instead, or take unlisted_rows");
    const std::uint64_t bytes = grouped_rows_bytes(recording.device(), layout);
    operands.workspace(memory, bytes);
    const std::uint64_t first = ranges_bytes(layout);
    const ops::GroupRanges ranges = place_ranges(layout, memory.sub(0, first));
    const BufferView list = memory.sub(first, bytes - first);
    const bool masked = layout.form == GroupLayout::Form::Masked;
    if (masked || layout.form == GroupLayout::Form::AlignedEnds) {
        const ops::GroupSource source{layout.values, layout.spacing, masked};
        return {layout, ops::make_group_tiles(recording, source, ranges, layout.rows,
                                              with_rows(columns), list)};
    }
    if (layout.form == GroupLayout::Form::RowGroups)
        make_ranges(recording, operands, layout, ranges, memory.sub(0, first));
    return {layout,
            ops::make_group_tiles(recording, ranges, layout.rows, with_rows(columns), list)};
}

GroupedRows make_grouped_rows(Recording& recording, const TensorView& topk_ids,
                              const ops::MoeLayout& layout, BufferView workspace,
                              const std::array<std::uint64_t, ops::GroupTiles::kMaxShapes>& columns,
                              BufferView memory) {
    auto groups = GroupLayout::prefix_sums(layout.offsets, layout.row_to_slot.extent[0]);
    groups.expected_rows = div_up(topk_ids.extent[0] * topk_ids.extent[1], groups.groups);
    Operands("fp8::make_grouped_rows")
        .workspace(memory, grouped_rows_bytes(recording.device(), groups));
    return {groups,
            ops::moe_layout(recording, topk_ids, layout, workspace, with_rows(columns), memory),
            layout.row_to_slot};
}

std::uint64_t listing_bytes(const Device& device, std::uint64_t rows, std::uint64_t groups) {
    const std::uint64_t list = 2 * round_up(4 * groups, 256) + // of forms that are no prefix sums
                               round_up(ops::group_tiles_bytes(device, rows, groups), 256);
    return list + round_up(ops::moe_layout_workspace_bytes(rows, 1, groups), 256) +
           2 * round_up(4 * (groups + 1), 256) + 2 * round_up(4 * rows, 256);
}

GroupedRows listed(Recording& recording, const GroupedRows& rows, std::uint64_t columns,
                   BufferView memory) {
    const GroupLayout& layout = rows.layout;
    if (layout.form != GroupLayout::Form::Ids) {
        GroupedRows result = make_grouped_rows(recording, layout, {columns, 0, 0, 0}, memory);
        result.slots = rows.slots;
        result.slots_per_a_row = rows.slots_per_a_row;
        result.d_by_slot = rows.d_by_slot;
        return result;
    }
    const auto words = [&](DType dtype, std::uint64_t count) {
        const TensorView view = TensorView::contiguous(memory.sub(0, 4 * count), dtype, {count});
        const std::uint64_t taken = round_up(4 * count, 256);
        memory = memory.sub(taken, memory.bytes - taken);
        return view;
    };
    const std::uint64_t slots = layout.rows;
    const ops::MoeLayout placed{
        .counts = words(DType::U32, layout.groups),
        .offsets = words(DType::U32, layout.groups + 1),
        .row_to_slot = words(DType::I32, slots),
        .slot_to_row =
            words(DType::I32, slots).reshaped({layout.values.extent[0], layout.values.extent[1]}),
        .alignment = 1};
    const std::uint64_t more =
        round_up(ops::moe_layout_workspace_bytes(slots, 1, layout.groups), 256);
    GroupedRows result =
        make_grouped_rows(recording, layout.values, placed, memory.sub(0, more), {columns, 0, 0, 0},
                          memory.sub(more, memory.bytes - more));
    result.layout.expected_rows = layout.expected_rows;
    result.slots_per_a_row = std::max(rows.slots_per_a_row, 1u);
    result.d_by_slot = true;
    return result;
}

} // namespace bellows::fp8
