// SPDX-License-Identifier: MIT
#pragma once

// The dense tensor ops: each checks its tensors, chooses a kernel variant and records one or a few
// dispatches. Nothing runs before the recording is submitted. The thread that owns the recording
// calls them.
//
// Common to all: "act" is the storage of activations, f32 or bf16, the same for all tensors of a
// call that are marked so; sums and arithmetic are f32. The last dimension of a tensor has stride
// 1; tensors are contiguous unless "strided" is said, where outer strides are free. Rows (columns,
// heads' sizes, row strides) are multiples of 4 elements and begin at addresses that are multiples
// of 4 elements. A default-constructed view stands for an optional tensor left out. Where
// a tensor's `row_count` is named, only that many of its rows exist, and the others are neither
// read nor written. Results do not depend on timing, the grid or the subgroup size; no float is
// added atomically. Every function throws Error{InvalidArgument} with names and shapes when
// tensors do not fit together, Error{Unsupported} when the device cannot run it.
//
// "accumulate": false overwrites the result, true adds to it.

#include <bellows/engine/gemm.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/engine/tensor.hpp>

#include <array>
#include <cstdint>
#include <vector>

namespace bellows::ops {

/// [first, first + count) of one dimension, strides kept.
TensorView slice(const TensorView& view, std::uint32_t dimension, std::uint64_t first,
                 std::uint64_t count);

// ---- Router -------------------------------------------------------------------------------

struct RouterOptions {
    enum class Score : std::uint8_t { Sigmoid, Softmax };
    Score score = Score::Sigmoid;
    /// Experts form `groups` equal groups in order; only the `group_top_k` best take part. A group
    /// counts by the sum of its `group_score_top` (1 or 2) best scores. groups <= 32; 1: no groups.
    std::uint32_t groups = 1;
    std::uint32_t group_top_k = 1;
    std::uint32_t group_score_top = 2;
    bool normalise = true; ///< weights of a token add up to route_scale
    float route_scale = 1;
};

/// Chooses the top_k experts of each token by score + bias, ties to the lower expert, in
/// descending order; weights come from the scores without the bias.
/// logits: [tokens, experts] f32, bias: [experts] f32 (optional), scores (out, for the gradient):
/// [tokens, experts] f32, topk_ids: [tokens, top_k] i32, topk_weights: [tokens, top_k] f32.
void router_forward(Recording& recording, const TensorView& logits, const TensorView& bias,
                    const TensorView& scores, const TensorView& topk_ids,
                    const TensorView& topk_weights, const RouterOptions& options);

/// DeepSeek-V3's sequence-wise balance loss (its paper, section 2.1.2), as far as the gradient
/// goes: weight * sum over tokens and experts of counts[sequence of the token, e] * s_e / sum_j
/// s_j, the counts being constants. With weight = alpha * experts / (top_k * seq) / tokens of the
/// batch it is alpha * sum_e f_e P_e, averaged over the batch's sequences.
struct RouterBalance {
    TensorView counts; ///< [sequences, experts] u32 (expert_counts); sequences divides tokens
    float weight = 0;  ///< 0: no balance loss, counts are not read
};

/// d_topk_weights: [tokens, top_k] f32; d_logits (out): [tokens, experts] f32.
void router_dgrad(Recording& recording, const TensorView& d_topk_weights,
                  const TensorView& topk_ids, const TensorView& scores, const TensorView& d_logits,
                  const RouterOptions& options, const RouterBalance& balance = {});

/// counts: [experts] u32, the number of slots that chose each expert; or [sequences, experts], of
/// each of so many equal runs of tokens. topk_ids: [tokens, top_k] i32; other values than
/// 0..experts-1 are not counted. topk_ids.row_count is honoured.
void expert_counts(Recording& recording, const TensorView& topk_ids, const TensorView& counts,
                   bool accumulate);

/// bias[e] += rate * sign(mean(counts) - counts[e]). counts: [experts] u32, bias: [experts] f32.
void router_bias_update(Recording& recording, const TensorView& counts, const TensorView& bias,
                        float rate);

// ---- MoE permutation ----------------------------------------------------------------------

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

/// Slots, tokens * top_k, of a layout at most.
constexpr std::uint64_t kMostMoeSlots = std::uint64_t{0xFFFF} * 256;

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
/// The gradient of moe_gather.
void moe_unpermute(Recording& recording, const TensorView& rows, const MoeLayout& layout,
                   const TensorView& weights, const TensorView& x, bool accumulate);

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
/// row_weight: [rows] f32 (optional); hidden: [rows, ffn] act. gate_up.row_count is honoured.
void swiglu_forward(Recording& recording, const TensorView& gate_up, const TensorView& row_weight,
                    const TensorView& hidden);

/// d_gate_up: [rows, 2 * ffn] act, may be gate_up; d_row_weight: [rows] f32, present if and only
/// if row_weight is. gate_up.row_count is honoured.
void swiglu_dgrad(Recording& recording, const TensorView& d_hidden, const TensorView& gate_up,
                  const TensorView& row_weight, const TensorView& d_gate_up,
                  const TensorView& d_row_weight);

// ---- RMSNorm ------------------------------------------------------------------------------

/// y = x * inv_rms * gain, inv_rms = 1 / sqrt(mean(x^2) + eps). x, y: [rows, columns] act, strided;
/// gain: [columns] f32, or bf16 where act is; inv_rms (out, for the gradients): [rows] f32.
void rmsnorm_forward(Recording& recording, const TensorView& x, const TensorView& gain,
                     const TensorView& y, const TensorView& inv_rms, float eps);

/// dx: [rows, columns] act, strided; may be dy.
void rmsnorm_dgrad(Recording& recording, const TensorView& dy, const TensorView& x,
                   const TensorView& gain, const TensorView& inv_rms, const TensorView& dx,
                   bool accumulate);

std::uint64_t rmsnorm_wgrad_workspace_bytes(std::uint64_t rows, std::uint64_t columns);
/// d_gain: [columns] f32. Rows are added in a fixed order.
void rmsnorm_wgrad(Recording& recording, const TensorView& dy, const TensorView& x,
                   const TensorView& inv_rms, const TensorView& d_gain, bool accumulate,
                   BufferView workspace);

// ---- Rotary embedding ---------------------------------------------------------------------

/// The table of rope_*: cos and sin of position * theta^(-2i / rope) for each pair i, computed in
/// f64 and rounded once: [positions, rope / 2, 2].
std::vector<float> rope_table(std::uint64_t positions, std::uint64_t rope, double theta);

/// Rotates the pairs (2i, 2i + 1). x, y: [tokens, rope] or [tokens, heads, rope] act, strided, may
/// be the same memory; table: [positions, rope / 2, 2] f32. The position of a token is
/// first_position + token % seq.
void rope_forward(Recording& recording, const TensorView& x, const TensorView& table,
                  const TensorView& y, std::uint64_t seq, std::uint64_t first_position = 0);
/// The gradient: rotates back.
void rope_dgrad(Recording& recording, const TensorView& dy, const TensorView& table,
                const TensorView& dx, std::uint64_t seq, std::uint64_t first_position = 0);

// ---- Latent attention's keys, copies ------------------------------------------------------

/// keys[t, h] = (kv_up[t, h, 0..nope), k_rope[t]). kv_up: [tokens, heads, >= nope] act, strided;
/// k_rope: [tokens, rope] act, strided; keys: [tokens, heads, nope + rope] act.
void mla_keys_forward(Recording& recording, const TensorView& kv_up, const TensorView& k_rope,
                      const TensorView& keys);
/// d_kv_up's first nope columns per head are written, the others left; d_k_rope is the sum over
/// heads in ascending order. Shapes as forward.
void mla_keys_dgrad(Recording& recording, const TensorView& d_keys, const TensorView& d_kv_up,
                    const TensorView& d_k_rope);

/// Of as many bytes, a multiple of 16, as are the offsets; on a role that takes dispatches. What
/// Recording::copy() does, which drivers of GPUs do at a third of the memory's rate on such queues.
void copy_bytes(Recording& recording, BufferView source, BufferView destination);

/// y = x, or y += x. Both act, of the same one to three extents, strided.
void copy(Recording& recording, const TensorView& x, const TensorView& y, bool accumulate = false);

/// y = transpose(x), bit by bit. x: [rows, columns] or [batch, rows, columns] of elements of two or
/// four bytes, strided; y: [columns, rows] or [batch, columns, rows] of the same type, strided, not
/// overlapping x. A matrix has up to 4 GiB, a batch any number of them.
void transpose(Recording& recording, const TensorView& x, const TensorView& y);

// ---- Embedding ----------------------------------------------------------------------------

/// embedded[t] = table[ids[t]]. ids: [tokens] u32; table: [vocab, columns] f32 or bf16; embedded:
/// [tokens, columns] of the table's type, or bf16. Ids outside the vocabulary give zeros.
void embedding_forward(Recording& recording, const TensorView& ids, const TensorView& table,
                       const TensorView& embedded);

std::uint64_t embedding_wgrad_workspace_bytes(std::uint64_t tokens);
/// d_table[id] = sum over the tokens of this id, ascending. d_embedded: [tokens, columns] act,
/// d_table: [vocab, columns] f32. ids begin at a multiple of 16 bytes.
void embedding_wgrad(Recording& recording, const TensorView& ids, const TensorView& d_embedded,
                     const TensorView& d_table, bool accumulate, BufferView workspace);

// ---- Loss ---------------------------------------------------------------------------------

/// Softmax cross-entropy and its gradient in one. logits: [rows, vocab] act, strided (the row
/// stride, not vocab, is a multiple of 4); targets: [rows] u32, kIgnoreTarget: no loss, gradient 0;
/// loss: [rows] f32; d_logits (optional): as logits, may be logits; d = scale * (softmax - onehot).
/// Any other target outside the vocabulary gives NaN.
inline constexpr std::uint32_t kIgnoreTarget = 0xFFFFFFFFu;
void cross_entropy(Recording& recording, const TensorView& logits, const TensorView& targets,
                   const TensorView& loss, const TensorView& d_logits, float scale);

// ---- Element-wise, on any number of elements ----------------------------------------------

/// y = alpha * x; y may be x. x, y: contiguous, act, same number of elements.
void scale(Recording& recording, const TensorView& x, const TensorView& y, float alpha);
/// y = alpha * a + beta * b; y may be a or b.
void add(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& y,
         float alpha = 1, float beta = 1);
/// f32 to bf16 (round to nearest even) or back; the same type: a copy.
void cast(Recording& recording, const TensorView& x, const TensorView& y);

// ---- Reductions and optimiser -------------------------------------------------------------

/// Number of partial sums that sum_partials and sum_squares_partials write for a tensor.
std::uint64_t num_partials(std::uint64_t elements);
/// One f32 per 4096 elements of x (act, contiguous): the sum of the elements, or of their squares.
/// partials: [num_partials(elements of x)] f32. The partials of many tensors may stand side by
/// side.
void sum_partials(Recording& recording, const TensorView& x, const TensorView& partials);
void sum_squares_partials(Recording& recording, const TensorView& x, const TensorView& partials);

std::uint64_t sum_pairs_workspace_bytes(std::uint64_t count);
/// The sum of values: [count] f32 in ascending order as a pair result: [2] f32 (high, low) of about
/// 48 bits.
void sum_pairs(Recording& recording, const TensorView& values, const TensorView& result,
               BufferView workspace);

/// result: [2] f32 = {min(1, max_norm / norm), norm} with norm = sqrt(high + low) of sum_squares:
/// [2] f32. max_norm 0: the coefficient is 1.
void clip_coefficient(Recording& recording, const TensorView& sum_squares, const TensorView& result,
                      float max_norm);

struct AdamwOptions {
    float beta1 = 0.9f;
    float beta2 = 0.95f;
    float eps = 1e-8f;
    float weight_decay = 0.1f;
};

/// What adamw reads on the device in step `step` (from 1 on): the learning rate and both bias
/// corrections, computed in f64. It stands in memory so that a recording serves every step.
std::array<float, 3> adamw_scalars(const AdamwOptions& options, double lr, std::uint64_t step);

/// weight: f32, gradient: f32, m, v: f32 or bf16, weight_copy: bf16 (optional), all contiguous with
/// the same number of elements; scalars: [3] f32; clip: [1] f32 or more (optional), the first
/// multiplies the gradient.
void adamw(Recording& recording, const TensorView& weight, const TensorView& gradient,
           const TensorView& m, const TensorView& v, const TensorView& weight_copy,
           const TensorView& scalars, const TensorView& clip, const AdamwOptions& options);

} // namespace bellows::ops
