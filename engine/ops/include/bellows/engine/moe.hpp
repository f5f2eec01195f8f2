// SPDX-License-Identifier: MIT
#pragma once

// Rows of tokens grouped by expert: placement, gathering, weighted sums, and SwiGLU between an
// expert's products. The contract that all ops share stands in ops.hpp.

#include <bellows/engine/gemm.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <array>
#include <cstdint>

namespace bellows::ops {

/// Where the slots (token, k) of `topk_ids` stand as rows grouped by local expert, in the order
/// (expert, token, k), each expert's rows beginning at a multiple of `alignment`.
struct MoeLayout {
    TensorView counts;      ///< [experts] u32, rows of each expert without padding
    TensorView offsets;     ///< [experts + 1] u32, first row of each; last: all rows with padding
    TensorView row_to_slot; ///< [capacity] i32, token * top_k + k; -1: padding
    TensorView slot_to_row; ///< [tokens, top_k] i32, -1: not here
    std::uint32_t alignment = 1;

    /// The u32 on the device that says how many rows there are.
    BufferView row_count() const;
};

struct MoeLayoutOptions {
    /// Whatever made the ids has counted them: the workspace begins with [blocks, experts] u32, the
    /// slots of each block that go to each expert.
    bool counted = false;
    /// As moe_scalars_to_rows, in the same dispatch: [tokens, top_k] and [capacity] f32; or
    /// neither.
    TensorView slot_values = {}, row_values = {};
};

/// Fills `layout` from topk_ids: [tokens, top_k] i32 of local experts, -1 (or anything outside
/// 0..experts-1) for "not here"; topk_ids.row_count is honoured. No sort. capacity >=
/// moe_capacity(...). One dispatch for a block or where they are counted, else two;
/// Error{InvalidArgument} for more than kMostMoeSlots and for more experts than a workgroup can
/// count (some thousands).
void moe_layout(Recording& recording, const TensorView& topk_ids, const MoeLayout& layout,
                BufferView workspace, const MoeLayoutOptions& options = {});
/// Makes the work list of grouped products over these rows too, in the same dispatches: what
/// make_group_tiles(layout.offsets) would make in `memory`, of group_tiles_bytes(device, capacity,
/// experts) bytes. Rows of padding are their expert's.
GroupTiles moe_layout(Recording& recording, const TensorView& topk_ids, const MoeLayout& layout,
                      BufferView workspace,
                      const std::array<std::uint64_t, GroupTiles::kMaxShapes>& columns,
                      BufferView memory);

/// rows[r] = x[token of r] (* weights[slot of r]); 0 in padding rows.
/// x: [tokens, columns] act, weights: [tokens, top_k] f32 (optional), rows: [capacity, columns]
/// act; all rows of the layout are written. The gradient of moe_unpermute.
void moe_gather(Recording& recording, const TensorView& x, const MoeLayout& layout,
                const TensorView& weights, const TensorView& rows);

/// x[t] = sum over k ascending of (weights[t, k] *) rows[slot_to_row[t, k]]; shapes as moe_gather.
/// The gradient of moe_gather. tree_ids (optional): [tokens, top_k] i32, below 2^26; the sum is
/// then made along the binary tree over these numbers, as an exchange makes exact sums: with the
/// same bits where the numbers are its experts. top_k is at most 64 there.
void moe_unpermute(Recording& recording, const TensorView& rows, const MoeLayout& layout,
                   const TensorView& weights, const TensorView& x, bool accumulate,
                   const TensorView& tree_ids = {});

/// Gradient of moe_unpermute's weights: d_weights[t, k] = dot(rows[slot_to_row[t, k]], d_x[t]).
/// d_weights: [tokens, top_k] f32.
void moe_weights_dgrad(Recording& recording, const TensorView& rows, const MoeLayout& layout,
                       const TensorView& d_x, const TensorView& d_weights);

/// row_values[r] = slot_values[slot of r], 0 in padding. slot_values: [tokens, top_k] f32,
/// row_values: [capacity] f32.
void moe_scalars_to_rows(Recording& recording, const TensorView& slot_values,
                         const MoeLayout& layout, const TensorView& row_values);
/// slot_values[s] = row_values[row of s], 0 where the slot is not here.
void moe_scalars_to_slots(Recording& recording, const TensorView& row_values,
                          const MoeLayout& layout, const TensorView& slot_values);

// ---- SwiGLU -------------------------------------------------------------------------------

/// hidden = silu(gate) * up (* row_weight). gate_up: [rows, 2 * ffn] act, gate first;
/// row_weight: [rows] f32 (optional); hidden: [rows, ffn] act. gate_up.row_count is honoured,
/// also a count for each so many rows.
void swiglu_forward(Recording& recording, const TensorView& gate_up, const TensorView& row_weight,
                    const TensorView& hidden);

/// d_gate_up: [rows, 2 * ffn] act, may be gate_up; d_row_weight: [rows] f32, present if and only
/// if row_weight is. gate_up.row_count is honoured.
void swiglu_dgrad(Recording& recording, const TensorView& d_hidden, const TensorView& gate_up,
                  const TensorView& row_weight, const TensorView& d_gate_up,
                  const TensorView& d_row_weight);

} // namespace bellows::ops
