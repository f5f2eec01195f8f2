// SPDX-License-Identifier: MIT
#pragma once

// The dense ops of a transformer in f64: forward, input-gradient and weight-gradient as separate
// functions, as on the device. All tensors are row-major and dense; nothing is computed in place.

#include "verify/reference/gemm.hpp"

#include <cstdint>

namespace bellows::reference {

// --- RMSNorm: y = gain · x / sqrt(mean(x²) + eps), each row of x [rows, columns] on its own
// --------

struct RmsNorm {
    Vector y;       ///< [rows, columns]
    Vector inv_rms; ///< [rows]: 1 / sqrt(mean(x²) + eps)
};
RmsNorm rmsnorm_forward(View x, View gain, std::size_t rows, std::size_t columns, double eps);
Vector rmsnorm_input_grad(View dy, View x, View gain, View inv_rms, std::size_t rows,
                          std::size_t columns);
/// Summed over the rows: [columns].
Vector rmsnorm_gain_grad(View dy, View x, View inv_rms, std::size_t rows, std::size_t columns);

// --- RoPE ----------------------------------------------------------------------------------------

/// Where in x [rows, heads, head_dim] the rotated part of each head stands.
struct RopeShape {
    std::size_t rows = 0;
    std::size_t heads = 1;
    std::size_t head_dim = 0;
    std::size_t offset = 0; ///< first rotated column of a head; the others are copied
    std::size_t dim = 0;    ///< rotated columns, even
    double theta = 10000;
    Vector frequencies{}; ///< [dim / 2], radians per position; empty: theta^(-2i/dim)
    double amplitude = 1;
};

/// Interleaved pairs: columns (2i, 2i+1) of the rotated part turn by the angle
/// positions[row] · frequencies[i] and are multiplied with the amplitude. `inverse` turns
/// backwards, which is the input-gradient.
Vector rope(View x, std::span<const std::int64_t> positions, const RopeShape& shape,
            bool inverse = false);

// --- causal attention ----------------------------------------------------------------------------

/// q [batch, queries, heads, qk_dim], k [batch, keys, kv_heads, qk_dim], v [batch, keys, kv_heads,
/// v_dim], output [batch, queries, heads, v_dim]. Query i sees the keys 0 … i + keys - queries.
/// Head h of the queries uses head h / (heads / kv_heads) of keys and values.
struct AttentionShape {
    std::size_t batch = 1;
    std::size_t queries = 0;
    std::size_t keys = 0; ///< >= queries
    std::size_t heads = 1;
    std::size_t qk_dim = 0;
    std::size_t v_dim = 0;
    double scale = 1;
    std::size_t kv_heads = 0; ///< divides heads; 0: heads
    /// [batch, queries]: the first key that a query sees, of its document; empty: 0.
    std::vector<std::size_t> begins{};

    std::size_t group() const { return kv_heads == 0 ? 1 : heads / kv_heads; }
};

struct Attention {
    Vector out;
    Vector lse; ///< [batch, heads, queries]: log of the sum of exp(scale · q·k)
};
Attention attention_forward(View q, View k, View v, const AttentionShape& shape);

struct AttentionGrads {
    Vector dq, dk, dv;
};
AttentionGrads attention_input_grad(View dout, View q, View k, View v, const AttentionShape& shape);

// --- SwiGLU: y = silu(gate) · up · weight[row], x = [rows, 2·ffn], the gate's columns first
// --------

/// weight: [rows], or empty for 1. y: [rows, ffn].
Vector swiglu_forward(View x, View weight, std::size_t rows, std::size_t ffn);

struct SwigluGrads {
    Vector dx;      ///< [rows, 2·ffn]
    Vector dweight; ///< [rows], also when weight is empty
};
SwigluGrads swiglu_input_grad(View dy, View x, View weight, std::size_t rows, std::size_t ffn);

// --- embedding -----------------------------------------------------------------------------------

/// table [vocabulary, hidden] -> [tokens, hidden].
Vector embedding_forward(View table, std::span<const std::int32_t> tokens, std::size_t hidden);
Vector embedding_weight_grad(View dy, std::span<const std::int32_t> tokens, std::size_t vocabulary,
                             std::size_t hidden);

// --- softmax cross-entropy -----------------------------------------------------------------------

struct CrossEntropy {
    Vector losses;         ///< [rows], nats; 0 where the target is -1
    double sum = 0;        ///< of losses
    std::size_t count = 0; ///< rows whose target is not -1
    Vector dlogits;        ///< [rows, vocabulary]: scale · (softmax - onehot), 0 where ignored
};
/// targets: [rows], -1 means ignore. scale: usually 1 / count of the whole batch.
CrossEntropy cross_entropy(View logits, std::span<const std::int32_t> targets,
                           std::size_t vocabulary, double scale);

} // namespace bellows::reference
