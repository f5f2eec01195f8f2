// SPDX-License-Identifier: MIT
#pragma once

// Causal attention without a score matrix in memory. Tensors are [tokens, heads, size] with free
// token and head strides (the last is 1), so that queries, keys, values and their gradients may be
// parts of wider tensors; all of one storage, f32 or bf16; sums are f32. tokens = sequences * seq:
// token i of a sequence sees the keys 0..i of the same one. Query/key and value heads may differ in
// size. There may be fewer heads of keys and values, kv_heads, which divides heads: head h of
// queries uses head h / (heads / kv_heads) of them. Sums have a fixed order: a row's bits depend on
// nothing but its query and the keys and values up to it. Tensors of bf16 go to matrix units where
// the device takes these for products (GemmClass), head sizes are multiples of its matrices' sides,
// strides of eight elements, memory begins at multiples of 16 bytes, and a tile fits the device (on
// a CPU of small heads alone): weights are rounded to the elements of matrices then. All throw
// Error{InvalidArgument} when tensors do not fit together. The thread that owns the recording
// calls.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace bellows::ops {

struct AttentionOptions {
    std::uint64_t seq = 0; ///< tokens per sequence
    float scale = 1;       ///< of the products, usually 1 / sqrt(qk_dim)
    /// Without memory each sequence is one document. Else [tokens, 2] u32: of each token the first
    /// one of its document in the sequence, at most the token itself, and the one behind its last,
    /// at most seq; the same of all tokens of a document. Tokens see the keys of their own document
    /// alone, and blocks of keys that nobody of a tile sees are left out. Bits then depend on where
    /// a document begins in its sequence, too; of sequences of one document each they are those
    /// without documents. The tensor is read when the recording runs.
    TensorView documents{};
};

/// o[i] = sum over j <= i of softmax(scale * q[i] . k[j]) * v[j].
/// q: [tokens, heads, qk_dim], k: [tokens, kv_heads, qk_dim], v: [tokens, kv_heads, v_dim], o:
/// [tokens, heads, v_dim]; lse (out, for the gradients): [tokens, heads] f32, the log of the sum of
/// the exponentials.
void attention_forward(Recording& recording, const TensorView& q, const TensorView& k,
                       const TensorView& v, const TensorView& o, const TensorView& lse,
                       const AttentionOptions& options);

struct AttentionGradients {
    TensorView dq; ///< as q
    TensorView dk; ///< as k: summed over the heads of queries that use it, in ascending order
    TensorView dv; ///< as v, summed like it
};

/// d_o: as o; o and lse as attention_forward left them. All three gradients are overwritten.
void attention_dgrad(Recording& recording, const TensorView& d_o, const TensorView& q,
                     const TensorView& k, const TensorView& v, const TensorView& o,
                     const TensorView& lse, const AttentionGradients& gradients,
                     const AttentionOptions& options, BufferView workspace);

// ---- Rotary embedding ---------------------------------------------------------------------

/// The table of rope_*: amplitude times cos and sin of position * frequencies[i] for each pair i,
/// computed in f64 and rounded once: [positions, pairs, 2].
std::vector<float> rope_table(std::uint64_t positions, std::span<const double> frequencies,
                              double amplitude = 1);

/// Rotates the pairs (2i, 2i + 1). x, y: [tokens, rope] or [tokens, heads, rope] act, strided, may
/// be the same memory; table: [positions, rope / 2, 2] f32. The position of a token is
/// first_position + token % seq.
void rope_forward(Recording& recording, const TensorView& x, const TensorView& table,
                  const TensorView& y, std::uint64_t seq, std::uint64_t first_position = 0);
/// The gradient: rotates back, with the same amplitude.
void rope_dgrad(Recording& recording, const TensorView& dy, const TensorView& table,
                const TensorView& dx, std::uint64_t seq, std::uint64_t first_position = 0);

// ---- Keys of latent attention --------------------------------------------------------------

/// keys[t, h] = (kv_up[t, h, 0..nope), k_rope[t]). kv_up: [tokens, heads, >= nope] act, strided;
/// k_rope: [tokens, rope] act, strided; keys: [tokens, heads, nope + rope] act.
void mla_keys_forward(Recording& recording, const TensorView& kv_up, const TensorView& k_rope,
                      const TensorView& keys);
/// d_kv_up's first nope columns per head are written, the others left; d_k_rope is the sum over
/// heads in ascending order. Shapes as forward.
void mla_keys_dgrad(Recording& recording, const TensorView& d_keys, const TensorView& d_kv_up,
                    const TensorView& d_k_rope);

/// Most token rows of mla_queries.
inline constexpr std::uint64_t kMostMlaQueryRows = 8;

/// Queries in the absorbed form, of up to eight rows: y[t, h] = (q[t, h, 0..nope) * weights[h],
/// the other columns of q[t, h] rotated to positions[t]). q: [rows, heads, nope + rope] act,
/// strided; weights: [heads, nope, latent] act, rows at multiples of 16 bytes; table: [positions,
/// rope / 2, 2] f32 (rope_table); positions: [rows] u32; y: [rows, heads, latent + rope] act,
/// strided. nope, rope and latent are multiples of 4, latent of 16 bytes. Sums are f32; a row's
/// bits do not depend on the others, but may on how many there are.
void mla_queries(Recording& recording, const TensorView& q, const TensorView& weights,
                 const TensorView& table, const TensorView& positions, const TensorView& y);

} // namespace bellows::ops
