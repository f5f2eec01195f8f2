// SPDX-License-Identifier: MIT
#pragma once

// What bench_ops times: for every dense op its tensors, the recording and the check of samples of
// its result against f64. `act` is the storage of activations; `part` says which op of a family.

#include "support/op_bench.hpp"

#include <bellows/engine/ops.hpp>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace bellows::bench {

struct Sizes {
    std::uint64_t tokens, seq, hidden, ffn, heads, nope, rope, value, vocab, experts, top_k;
    std::uint64_t grouped_heads, grouped_size; ///< of grouped attention: heads of queries
    std::uint64_t latent, sequences;           ///< of a generated token: sequences of `seq` keys
};

using MakeWorkload = Workload(OpData& data, const Sizes& sizes, DType act, int part);

MakeWorkload rmsnorm;             ///< 0 forward, 1 dgrad, 2 wgrad
MakeWorkload swiglu;              ///< 0 forward, 1 dgrad
MakeWorkload embedding;           ///< 0 forward, 1 wgrad
MakeWorkload cross_entropy;       ///< loss and gradient
MakeWorkload rope;                ///< 0 forward, 1 dgrad
MakeWorkload mla_keys;            ///< 0 forward, 1 dgrad
MakeWorkload attention;           ///< 0 forward, 1 dgrad (all three gradients)
MakeWorkload packed_attention;    ///< the same, each sequence of four documents of equal length
MakeWorkload grouped_attention_4; ///< the same, four heads of queries to one of keys and values
MakeWorkload grouped_attention_8; ///< eight
MakeWorkload paged_latent; ///< latents: a generated token (0 as act, 1 in FP8), a prompt (2, 3)
MakeWorkload paged_heads;  ///< heads of keys and values: 0 a generated token, 1 a prompt
MakeWorkload few_rows;     ///< FP8 weights by one row and its norm: 0 a projection, 1 with SwiGLU
MakeWorkload few_rows_experts; ///< of a token's experts: 0 with SwiGLU, 1 their sum
MakeWorkload router;           ///< 0 forward, 1 dgrad, 2 expert_counts, 3 router_bias_update
MakeWorkload elementwise;      ///< 0 add, 1 cast, 2 scale, 3 copy
MakeWorkload transpose;        ///< of matrices as experts' weights
MakeWorkload reduction;        ///< 0 sum of squares, 1 sum, 2 clip_coefficient
MakeWorkload adamw;            ///< act: storage of the moments

/// The likeliest token; a draw from all; a draw behind top_k = 50, top_p = 0.95, min_p = 0.001.
enum class SampleKind : std::uint8_t { Likeliest, Plain, Cut };
Workload sampling(OpData& data, SampleKind kind, std::uint64_t rows, std::uint64_t vocabulary);

inline double sigmoid(double x) {
    return 1 / (1 + std::exp(-x));
}

} // namespace bellows::bench
