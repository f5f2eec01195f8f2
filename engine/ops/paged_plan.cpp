// SPDX-License-Identifier: MIT
// Sizes of a paged cache and the plan of a step over it: no device.
#include "arguments.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/paged_attention.hpp>

#include <algorithm>

namespace bellows::ops {

std::uint64_t cache_token_bytes(const CacheShape& shape) {
    std::uint64_t bytes = 0;
    if (shape.form == CacheShape::Form::Heads)
        bytes = shape.kv_heads * (shape.qk_dim + shape.v_dim) * size_of(shape.dtype);
    else if (shape.dtype == DType::F8E4M3)
        bytes = shape.latent + shape.latent / 128 * sizeof(float) + 2 * shape.rope;
    else
        bytes = (shape.latent + shape.rope) * size_of(shape.dtype);
    return div_up(bytes, 16) * 16;
}

std::uint64_t cache_bytes(const CacheShape& shape, std::uint64_t blocks) {
    return blocks * kCacheBlock * cache_token_bytes(shape);
}

namespace {

/// Appends the items of rows [first, first + rows) of a sequence, of which the first sees `keys`
/// keys, and their rows' parts.
void plan_group(const Arguments& arguments, PagedPlan& plan, std::uint64_t first,
                std::uint64_t rows, std::uint64_t keys, std::uint32_t sequence) {
    const auto parts_of = [&](std::uint64_t seen) {
        return div_up(div_up(seen, kCacheBlock), plan.split_blocks);
    };
    const std::uint64_t blocks = div_up(keys + rows - 1, kCacheBlock);
    const std::uint64_t parts = parts_of(keys + rows - 1);
    for (std::uint64_t part = 0; part < parts; ++part) {
        const std::uint64_t begin = part * plan.split_blocks;
        for (const std::uint64_t word :
             {first, rows, std::uint64_t{sequence}, keys, begin,
              std::min(blocks, begin + plan.split_blocks), plan.partials + part, parts})
            plan.items.push_back(arguments.u32("a number of the plan", word));
    }
    for (std::uint64_t row = 0; row < rows; ++row) {
        plan.rows.push_back(arguments.u32("a partial result", plan.partials + row * parts));
        plan.rows.push_back(static_cast<std::uint32_t>(parts_of(keys + row)));
    }
    plan.partials += rows * parts;
}

} // namespace

PagedPlan plan_paged_attention(std::span<const PagedQueries> queries, std::uint64_t split_blocks,
                               std::uint64_t rows_per_item) {
    const Arguments arguments("plan_paged_attention");
    arguments.require(split_blocks > 0, "split_blocks is 0");
    arguments.require(rows_per_item > 0, "rows_per_item is 0");
    PagedPlan plan;
    plan.split_blocks = split_blocks;
    plan.items.assign(PagedPlan::kItemWords, 0);
    for (const PagedQueries& of : queries) {
        if (of.keys > 0 && of.keys < of.rows)
            arguments.fail(std::to_string(of.rows) + " rows of sequence " +
                           std::to_string(of.sequence) + " see only " + std::to_string(of.keys) +
                           " keys");
        const std::uint64_t before = plan.rows.size() / PagedPlan::kRowWords;
        if (of.keys == 0) {
            plan.rows.resize(plan.rows.size() + of.rows * PagedPlan::kRowWords, 0);
            continue;
        }
        for (std::uint64_t row = 0; row < of.rows; row += rows_per_item)
            plan_group(arguments, plan, before + row, std::min(rows_per_item, of.rows - row),
                       of.keys - of.rows + 1 + row, of.sequence);
    }
    plan.items[0] = arguments.u32("items", plan.num_items());
    return plan;
}

PagedCapacity paged_capacity(std::uint64_t rows, std::uint64_t sequences, std::uint64_t blocks,
                             std::uint64_t split_blocks, std::uint64_t rows_per_item) {
    const Arguments arguments("paged_capacity");
    arguments.require(split_blocks > 0, "split_blocks is 0");
    arguments.require(rows_per_item > 0, "rows_per_item is 0");
    // Every group may end with a part, and every sequence with a group, that is not full.
    const std::uint64_t groups = std::min(rows, rows / rows_per_item + sequences);
    const std::uint64_t items = blocks / split_blocks + groups;
    return {.rows = rows, .items = items, .partials = items * std::min(rows, rows_per_item)};
}

std::uint64_t paged_attention_workspace_bytes(const PagedCapacity& capacity, std::uint64_t heads,
                                              std::uint64_t v_dim) {
    const std::uint64_t results = capacity.partials * heads;
    return results * v_dim * sizeof(float) + div_up(results * sizeof(float), 16) * 16;
}

} // namespace bellows::ops
