// SPDX-License-Identifier: MIT
#pragma once

// Bytes and counts that the ops' operands take. Pure functions of sizes, without a device: whoever
// plans a run calls them, too. What they are for stands beside each op.

#include <cstdint>

namespace bellows::ops {

/// Workspaces of weight and input gradients.
std::uint64_t attention_dgrad_workspace_bytes(std::uint64_t tokens, std::uint64_t heads);
std::uint64_t embedding_wgrad_workspace_bytes(std::uint64_t tokens);
std::uint64_t gemm_tn_tall_workspace_bytes(std::uint64_t k, std::uint64_t m, std::uint64_t n);
/// Rows of one of its runs.
std::uint64_t gemm_tn_tall_rows(std::uint64_t k, std::uint64_t m, std::uint64_t n);
std::uint64_t rmsnorm_wgrad_workspace_bytes(std::uint64_t rows, std::uint64_t columns);
/// Rows that one invocation of rmsnorm_wgrad adds up; part of the result's rounding.
inline constexpr std::uint64_t kRmsnormWgradRows = 32;

/// Slots, tokens * top_k, of a layout at most.
inline constexpr std::uint64_t kMostMoeSlots = std::uint64_t{0xFFFF} * 256;
/// Blocks of a layout at most, as every workgroup adds the counts of all of them up.
inline constexpr std::uint64_t kMostMoeBlocks = 256;

/// Rows that a layout can need.
std::uint64_t moe_capacity(std::uint64_t tokens, std::uint64_t top_k, std::uint64_t experts,
                           std::uint32_t alignment);
std::uint64_t moe_layout_workspace_bytes(std::uint64_t tokens, std::uint64_t top_k,
                                         std::uint64_t experts);

/// The blocks, of `slots` slots each (the last has fewer), that a layout of so many slots, tokens *
/// top_k, is placed by.
struct MoeBlocks {
    std::uint64_t slots, count;
};
MoeBlocks moe_blocks(std::uint64_t slots);

/// Number of partial sums that sum_partials and sum_squares_partials write for a tensor.
std::uint64_t num_partials(std::uint64_t elements);
/// Elements of a partial sum, and pairs that sum_pairs adds up at a time.
inline constexpr std::uint64_t kPartialElements = 4096, kPairChunk = 1024;
std::uint64_t sum_pairs_workspace_bytes(std::uint64_t count);

} // namespace bellows::ops
