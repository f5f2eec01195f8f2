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
};

using MakeWorkload = Workload(OpData& data, const Sizes& sizes, DType act, int part);

MakeWorkload rmsnorm;       ///< 0 forward, 1 dgrad, 2 wgrad
MakeWorkload swiglu;        ///< 0 forward, 1 dgrad
MakeWorkload embedding;     ///< 0 forward, 1 wgrad
MakeWorkload cross_entropy; ///< loss and gradient
MakeWorkload rope;          ///< 0 forward, 1 dgrad
MakeWorkload mla_keys;      ///< 0 forward, 1 dgrad
MakeWorkload attention;     ///< 0 forward, 1 dgrad
MakeWorkload router;        ///< 0 forward, 1 dgrad, 2 expert_counts, 3 router_bias_update
MakeWorkload
    moe; ///< 0 layout, 1 gather, 2 unpermute, 3 weights_dgrad, 4 and 5 scalars to rows, slots
MakeWorkload elementwise; ///< 0 add, 1 cast, 2 scale, 3 copy
MakeWorkload reduction;   ///< 0 sum of squares, 1 sum, 2 clip_coefficient
MakeWorkload adamw;       ///< act: storage of the moments

inline double tolerance(DType dtype) {
    return dtype == DType::BF16 ? 8e-3 : 1e-4;
}

inline double bytes_of(std::initializer_list<TensorView> views) {
    double bytes = 0;
    for (const TensorView& view : views)
        bytes += static_cast<double>(view.num_bytes());
    return bytes;
}

inline double sigmoid(double x) {
    return 1 / (1 + std::exp(-x));
}

/// First, middle and last of `count`.
inline std::vector<std::uint64_t> samples(std::uint64_t count) {
    return {0, count / 2, count - 1};
}

} // namespace bellows::bench
