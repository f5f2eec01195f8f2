// SPDX-License-Identifier: MIT
#include "gemm_launch.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/moe.hpp>
#include <bellows/engine/spread_plan.hpp>
#include <bellows/engine/words64.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::ops {

namespace {

constexpr std::uint64_t kCountable = 0xFFFF; // by half a word

struct LayoutSizes {
    std::uint64_t tokens, top_k, experts, capacity;
};

LayoutSizes check_layout(const Arguments& arguments, const MoeLayout& layout) {
    arguments.rank("slot_to_row", layout.slot_to_row, 2);
    arguments.rank("row_to_slot", layout.row_to_slot, 1);
    arguments.rank("counts", layout.counts, 1);
    LayoutSizes sizes{layout.slot_to_row.extent[0], layout.slot_to_row.extent[1],
                      layout.counts.extent[0], layout.row_to_slot.extent[0]};
    arguments.require(sizes.experts > 0 && sizes.top_k > 0, "there are no experts or no slots");
    arguments.require(layout.alignment > 0, "the alignment is 0");
    arguments.tensor("counts", layout.counts, DType::U32, {sizes.experts});
    arguments.tensor("offsets", layout.offsets, DType::U32, {sizes.experts + 1});
    arguments.tensor("row_to_slot", layout.row_to_slot, DType::I32, {sizes.capacity});
    arguments.tensor("slot_to_row", layout.slot_to_row, DType::I32, {sizes.tokens, sizes.top_k});
    const std::uint64_t needed =
        moe_capacity(sizes.tokens, sizes.top_k, sizes.experts, layout.alignment);
    arguments.require(sizes.capacity >= needed,
                      "the layout has room for " + std::to_string(sizes.capacity) +
                          " rows, needed are up to " + std::to_string(needed));
    arguments.require(sizes.capacity <= 0x7FFFFFFF && sizes.tokens * sizes.top_k <= 0x7FFFFFFF,
                      "more than 2^31 - 1 rows or slots");
    return sizes;
}

/// Checks the tensors of moe_gather and moe_unpermute; returns the number of columns.
std::uint64_t check_rows(const Arguments& arguments, const LayoutSizes& sizes,
                         const TensorView& tokens, const char* tokens_name,
                         const TensorView& rows) {
    arguments.rank(tokens_name, tokens, 2);
    arguments.activation(tokens_name, tokens);
    const std::uint64_t columns = tokens.extent[1];
    arguments.multiple_of_4("columns", columns);
    arguments.tensor(tokens_name, tokens, tokens.dtype, {sizes.tokens, columns});
    arguments.tensor("rows", rows, tokens.dtype, {sizes.capacity, columns});
    return columns;
}

void check_weights(const Arguments& arguments, const LayoutSizes& sizes,
                   const TensorView& weights) {
    if (weights.buffer) {
        arguments.tensor("weights", weights, DType::F32, {sizes.tokens, sizes.top_k});
    }
}

} // namespace

BufferView MoeLayout::row_count() const {
    return offsets.buffer.sub((offsets.extent[0] - 1) * 4, 4);
}

namespace {

/// Runs of a block's slots: as many as have room for their counters, eight slots each at least,
/// which an invocation loads at once.
std::uint32_t plan_parts(const Arguments& arguments, const DeviceInfo& info, std::uint64_t pairs,
                         std::uint64_t block_slots, std::uint32_t local_size) {
    const auto bytes = [&](std::uint64_t parts) {
        return 4 * pairs * (parts + 1) + 24 * pairs + std::uint64_t{8} * local_size;
    };
    std::uint32_t parts = 1;
    while (2 * parts <= local_size && parts * 8 < block_slots &&
           bytes(2 * parts) <= std::min<std::uint64_t>(info.shared_memory_bytes, 40960))
        parts *= 2;
    arguments.require(bytes(parts) <= info.shared_memory_bytes,
                      std::to_string(2 * pairs) +
                          " experts are more than the device has workgroup memory to count");
    return parts;
}

void place(Recording& recording, const Arguments& arguments, const TensorView& topk_ids,
           const MoeLayout& layout, BufferView workspace, const MoeLayoutOptions& options,
           const GroupTiles* list) {
    const LayoutSizes sizes = check_layout(arguments, layout);
    arguments.tensor("topk_ids", topk_ids, DType::I32, {sizes.tokens, sizes.top_k});
    arguments.workspace(workspace,
                        moe_layout_workspace_bytes(sizes.tokens, sizes.top_k, sizes.experts));
    const std::uint64_t slots = sizes.tokens * sizes.top_k;
    const auto [block_slots, blocks] = moe_blocks(slots);
    arguments.require(block_slots <= kCountable,
                      "more than " + std::to_string(kMostMoeSlots) + " slots");
    static_assert(kMostMoeSlots == kCountable * kMostMoeBlocks);
    const bool values = static_cast<bool>(options.row_values.buffer);
    if (values) {
        arguments.tensor("slot_values", options.slot_values, DType::F32,
                         {sizes.tokens, sizes.top_k});
        arguments.tensor("row_values", options.row_values, DType::F32, {sizes.capacity});
    }
    const DeviceInfo& info = recording.device().info();
    using K = kernels::MoeLayout;
    K kernel;
    kernel.constants.local_size = info.is_cpu ? 32 : std::min(info.max_workgroup_invocations, 256u);
    kernel.constants.pairs = arguments.u32("experts", div_up(sizes.experts, 2));
    kernel.constants.parts = plan_parts(arguments, info, kernel.constants.pairs, block_slots,
                                        kernel.constants.local_size);
    const BufferView counts = arguments.memory("counts", layout.counts, 1);
    const BufferView row_to_slot =
        sizes.capacity == 0 ? counts : arguments.memory("row_to_slot", layout.row_to_slot, 1);
    kernel.topk_ids = slots == 0 ? counts : arguments.memory("topk_ids", topk_ids, 1);
    kernel.token_count = arguments.row_count_or(topk_ids, kernel.topk_ids);
    kernel.block_counts = blocks > 1 ? workspace.sub(0, blocks * sizes.experts * 4) : counts;
    kernel.counts = counts;
    kernel.offsets = arguments.memory("offsets", layout.offsets, 1);
    kernel.row_to_slot = row_to_slot;
    kernel.slot_to_row =
        slots == 0 ? row_to_slot : arguments.memory("slot_to_row", layout.slot_to_row, 1);
    kernel.slot_values = kernel.row_values = counts;
    if (values && slots > 0) {
        kernel.slot_values = arguments.memory("slot_values", options.slot_values, 1);
        kernel.row_values = arguments.memory("row_values", options.row_values, 1);
        kernel.has_values = 1;
    }
    kernel.tiles = kernel.arguments = counts;
    if (list != nullptr)
        fill_group_tiles(kernel, *list);
    kernel.slots = arguments.u32("slots", slots);
    kernel.top_k = arguments.u32("top_k", sizes.top_k);
    kernel.experts = arguments.u32("experts", sizes.experts);
    kernel.alignment = layout.alignment;
    kernel.capacity = arguments.u32("rows", sizes.capacity);
    kernel.block_slots = arguments.u32("slots", block_slots);
    kernel.has_token_count = topk_ids.row_count ? 1 : 0;
    kernel.has_list = list != nullptr ? 1 : 0;
    const Groups groups{arguments.u32("slots", blocks)};
    if (blocks > 1 && !options.counted) {
        kernel.variant = K::Variant::count;
        recording.dispatch(kernel, groups);
    }
    kernel.variant = K::Variant::place;
    recording.dispatch(kernel, groups);
}

} // namespace

void moe_layout(Recording& recording, const TensorView& topk_ids, const MoeLayout& layout,
                BufferView workspace, const MoeLayoutOptions& options) {
    place(recording, Arguments("moe_layout"), topk_ids, layout, workspace, options, nullptr);
}

GroupTiles moe_layout(Recording& recording, const TensorView& topk_ids, const MoeLayout& layout,
                      BufferView workspace,
                      const std::array<std::uint64_t, GroupTiles::kMaxShapes>& columns,
                      BufferView memory) {
    const Arguments arguments("moe_layout");
    const GroupTiles list =
        plan_group_tiles(arguments, recording.device(), group_ranges(layout.offsets),
                         layout.row_to_slot.extent[0], columns, memory);
    place(recording, arguments, topk_ids, layout, workspace, {}, &list);
    return list;
}

void moe_gather(Recording& recording, const TensorView& x, const MoeLayout& layout,
                const TensorView& weights, const TensorView& rows) {
    const Arguments arguments("moe_gather");
    const LayoutSizes sizes = check_layout(arguments, layout);
    const std::uint64_t columns = check_rows(arguments, sizes, x, "x", rows);
    check_weights(arguments, sizes, weights);
    if (sizes.tokens == 0 || columns == 0) {
        return;
    }
    const std::uint32_t wide = fours_at_once({x, rows});
    const std::uint64_t units = columns / 4 / wide;
    RowPlan plan = plan_rows(recording, sizes.capacity, units, RowWork::Elementwise);
    const bool by_token = !recording.device().info().is_cpu;
    SpreadPlan spread;
    if (by_token) {
        spread = plan_spread(units, plan.local_size);
        // Of bf16, short parts and a row after the other won on an H200.
        constexpr std::uint32_t kUnits = 4;
        if (wide == 2)
            spread = {kUnits, arguments.u32("parts", div_up(units, kUnits * plan.local_size)), 1};
        // Before the tokens the rows, which may be padding.
        const std::uint64_t items = sizes.tokens + div_up(sizes.capacity, plan.local_size);
        plan.groups.x = row_groups(plan, arguments.u32("tokens and rows", items));
        plan.groups.y = spread.parts;
    }
    const BufferView row_to_slot = arguments.memory("row_to_slot", layout.row_to_slot, 1);
    recording.dispatch(
        kernels::MoeGather{
            .variant = row_variant<kernels::MoeGather>(recording.device(), x.dtype == DType::BF16),
            .constants = {plan.local_size, plan.row_per_workgroup, wide, by_token ? 1u : 0u,
                          spread.at_once, spread.slots_at_once},
            .x = arguments.memory("x", x),
            .row_to_slot = row_to_slot,
            .slot_to_row = arguments.memory("slot_to_row", layout.slot_to_row, 1),
            .weights = arguments.memory_or("weights", weights, row_to_slot, 1),
            .row_count = layout.row_count(),
            .out_rows = arguments.memory("rows", rows),
            .rows = arguments.u32("rows", sizes.capacity),
            .tokens = arguments.u32("tokens", sizes.tokens),
            .units = arguments.groups_of_4("columns", columns) / wide,
            .top_k = arguments.u32("top_k", sizes.top_k),
            .has_weights = weights.buffer ? 1u : 0u},
        plan.groups);
}

void moe_unpermute(Recording& recording, const TensorView& rows, const MoeLayout& layout,
                   const TensorView& weights, const TensorView& x, bool accumulate,
                   const TensorView& tree_ids) {
    const Arguments arguments("moe_unpermute");
    const LayoutSizes sizes = check_layout(arguments, layout);
    const std::uint64_t columns = check_rows(arguments, sizes, x, "x", rows);
    check_weights(arguments, sizes, weights);
    if (tree_ids.buffer)
        arguments.tensor("tree_ids", tree_ids, DType::I32, {sizes.tokens, sizes.top_k});
    if (sizes.tokens == 0 || columns == 0) {
        return;
    }
    const std::uint32_t wide = fours_at_once({x, rows});
    const std::uint64_t units = columns / 4 / wide;
    RowPlan plan = plan_rows(recording, sizes.tokens, units, RowWork::Elementwise);
    // Few tokens: each invocation waits for the loads of all its rows at once.
    constexpr std::uint64_t kFewUnits = std::uint64_t{1} << 18;
    constexpr std::uint32_t kAhead = 8;
    const std::uint32_t tree = tree_ids.buffer ? arguments.u32("top_k", sizes.top_k) : 0;
    const bool few = !recording.device().info().is_cpu && sizes.tokens * units <= kFewUnits;
    if (few)
        plan.groups = {static_cast<std::uint32_t>(div_up(units, plan.local_size)),
                       static_cast<std::uint32_t>(std::min(sizes.tokens, kMaxGroups)), 1};
    const BufferView slot_to_row = arguments.memory("slot_to_row", layout.slot_to_row, 1);
    recording.dispatch(
        kernels::MoeUnpermute{
            .variant = storage_variant<kernels::MoeUnpermute>(x.dtype),
            .constants = {plan.local_size, plan.row_per_workgroup, wide, tree, few ? kAhead : 1},
            .rows = arguments.memory("rows", rows),
            .slot_to_row = slot_to_row,
            .topk_ids = arguments.memory_or("tree_ids", tree_ids, slot_to_row, 1),
            .weights = arguments.memory_or("weights", weights, slot_to_row, 1),
            .out_tokens = arguments.memory("x", x),
            .tokens = arguments.u32("tokens", sizes.tokens),
            .units = arguments.groups_of_4("columns", columns) / wide,
            .top_k = arguments.u32("top_k", sizes.top_k),
            .has_weights = weights.buffer ? 1u : 0u,
            .accumulate = accumulate ? 1u : 0u},
        plan.groups);
}

void moe_weights_dgrad(Recording& recording, const TensorView& rows, const MoeLayout& layout,
                       const TensorView& d_x, const TensorView& d_weights) {
    const Arguments arguments("moe_weights_dgrad");
    const LayoutSizes sizes = check_layout(arguments, layout);
    const std::uint64_t columns = check_rows(arguments, sizes, d_x, "d_x", rows);
    arguments.tensor("d_weights", d_weights, DType::F32, {sizes.tokens, sizes.top_k});
    if (sizes.tokens == 0) {
        return;
    }
    const std::uint64_t slots = sizes.tokens * sizes.top_k;
    const RowPlan plan = plan_rows(recording, slots, columns / 4, RowWork::Reduction);
    recording.dispatch(
        kernels::MoeWeightsDgrad{.variant = storage_variant<kernels::MoeWeightsDgrad>(d_x.dtype),
                                 .constants = {plan.local_size, plan.row_per_workgroup},
                                 .rows = arguments.memory("rows", rows),
                                 .slot_to_row =
                                     arguments.memory("slot_to_row", layout.slot_to_row, 1),
                                 .d_out = arguments.memory("d_x", d_x),
                                 .d_weights = arguments.memory("d_weights", d_weights, 1),
                                 .slots = arguments.u32("slots", slots),
                                 .top_k = arguments.u32("top_k", sizes.top_k),
                                 .columns4 = arguments.groups_of_4("columns", columns)},
        plan.groups);
}

namespace {

void move_scalars(Recording& recording, BufferView values, BufferView map, BufferView row_count,
                  BufferView moved, std::uint32_t count, bool has_row_count) {
    const FlatPlan plan = plan_flat(recording, count, 16);
    recording.dispatch(kernels::MoeMoveScalars{.constants = {.local_size = plan.local_size},
                                               .values = values,
                                               .map = map,
                                               .row_count = row_count,
                                               .moved = moved,
                                               .count = count,
                                               .has_row_count = has_row_count ? 1u : 0u},
                       plan.groups);
}

} // namespace

void moe_scalars_to_rows(Recording& recording, const TensorView& slot_values,
                         const MoeLayout& layout, const TensorView& row_values) {
    const Arguments arguments("moe_scalars_to_rows");
    const LayoutSizes sizes = check_layout(arguments, layout);
    arguments.tensor("slot_values", slot_values, DType::F32, {sizes.tokens, sizes.top_k});
    arguments.tensor("row_values", row_values, DType::F32, {sizes.capacity});
    if (sizes.tokens == 0) {
        return;
    }
    move_scalars(recording, arguments.memory("slot_values", slot_values, 1),
                 arguments.memory("row_to_slot", layout.row_to_slot, 1), layout.row_count(),
                 arguments.memory("row_values", row_values, 1),
                 arguments.u32("rows", sizes.capacity), true);
}

void moe_scalars_to_slots(Recording& recording, const TensorView& row_values,
                          const MoeLayout& layout, const TensorView& slot_values) {
    const Arguments arguments("moe_scalars_to_slots");
    const LayoutSizes sizes = check_layout(arguments, layout);
    arguments.tensor("slot_values", slot_values, DType::F32, {sizes.tokens, sizes.top_k});
    arguments.tensor("row_values", row_values, DType::F32, {sizes.capacity});
    if (sizes.tokens == 0) {
        return;
    }
    const BufferView map = arguments.memory("slot_to_row", layout.slot_to_row, 1);
    move_scalars(recording, arguments.memory("row_values", row_values, 1), map, map,
                 arguments.memory("slot_values", slot_values, 1),
                 arguments.u32("slots", sizes.tokens * sizes.top_k), false);
}

} // namespace bellows::ops
