// SPDX-License-Identifier: MIT
#include <bellows/engine/sizes.hpp>

#include <bellows/base/rounding.hpp>

#include <algorithm>

namespace bellows::ops {

std::uint64_t attention_dgrad_workspace_bytes(std::uint64_t tokens, std::uint64_t heads) {
    return 4 * tokens * heads;
}

std::uint64_t embedding_wgrad_workspace_bytes(std::uint64_t tokens) {
    return 2 * 4 * tokens;
}

/// So many runs that there are some 2^20 elements to compute, none under 128 rows.
std::uint64_t gemm_tn_tall_rows(std::uint64_t k, std::uint64_t m, std::uint64_t n) {
    constexpr std::uint64_t kElements = std::uint64_t{1} << 20, kLeastRows = 128;
    const std::uint64_t runs = kElements / std::max<std::uint64_t>(m * n, 1);
    return std::max(div_up(k, std::max<std::uint64_t>(runs, 1)), kLeastRows);
}

std::uint64_t gemm_tn_tall_workspace_bytes(std::uint64_t k, std::uint64_t m, std::uint64_t n) {
    const std::uint64_t rows = gemm_tn_tall_rows(k, m, n);
    return k <= rows ? 0 : div_up(k, rows) * m * n * sizeof(float);
}

std::uint64_t rmsnorm_wgrad_workspace_bytes(std::uint64_t rows, std::uint64_t columns) {
    return div_up(rows, kRmsnormWgradRows) * columns * 4;
}

namespace {

constexpr std::uint64_t kOneBlock = 2048;   // slots that one workgroup places by itself
constexpr std::uint64_t kBlockSlots = 1024; // of a workgroup otherwise

} // namespace

std::uint64_t moe_capacity(std::uint64_t tokens, std::uint64_t top_k, std::uint64_t experts,
                           std::uint32_t alignment) {
    // Every expert that has rows may waste alignment - 1 of them.
    const std::uint64_t slots = tokens * top_k;
    const std::uint64_t used_experts = std::min(experts, slots);
    return div_up(slots + used_experts * (alignment - 1), alignment) * alignment;
}

MoeBlocks moe_blocks(std::uint64_t slots) {
    if (slots <= kOneBlock)
        return {std::max<std::uint64_t>(slots, 1), 1};
    const std::uint64_t of_each = std::max(kBlockSlots, div_up(slots, kMostMoeBlocks));
    return {of_each, div_up(slots, of_each)};
}

std::uint64_t moe_layout_workspace_bytes(std::uint64_t tokens, std::uint64_t top_k,
                                         std::uint64_t experts) {
    return moe_blocks(tokens * top_k).count * experts * 4;
}

std::uint64_t num_partials(std::uint64_t elements) {
    return div_up(elements, kPartialElements);
}

std::uint64_t sum_pairs_workspace_bytes(std::uint64_t count) {
    std::uint64_t bytes = 0;
    for (count = div_up(count, kPairChunk); count > 1; count = div_up(count, kPairChunk)) {
        bytes += 8 * count;
    }
    return bytes;
}

} // namespace bellows::ops
