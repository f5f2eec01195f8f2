// SPDX-License-Identifier: MIT
#pragma once

// One dispatch stands between a layer's attention and its experts, for few tokens: it makes
// RMSNorm, its codes, the router's logits and its choice, by a device's own code. The thread that
// owns the recording calls it; errors are Error{InvalidArgument} with all shapes, and nothing is
// recorded then.

#include <bellows/engine/router.hpp>
#include <bellows/fp8/quantize.hpp>

#include <string>

namespace bellows::fp8 {

struct Route {
    TensorView x;    ///< [tokens, hidden] bf16; row_count is honoured
    TensorView gain; ///< [hidden] bf16 or f32, at a multiple of 16 bytes
    float eps = 0;
    TensorView gate;      ///< [experts, hidden] bf16
    TensorView bias = {}; ///< [experts] f32 (optional)
    ops::RouterOptions options;
    /// So many experts more are every token's, with weight 1: those behind the others.
    std::uint32_t shared = 0;
};

/// "" when the device takes it, else what is against it. top_k: without the shared experts.
std::string why_not_route(const Device& device, const Route& route, std::uint64_t top_k);

/// codes (out): of x's norm as rmsnorm() writes them; ids and weights (out), [tokens, top_k +
/// shared] i32 and f32: as ops::router_forward() chooses by logits that are the norm in bf16 times
/// gate, in f32, and the shared experts behind them.
void route(Recording& recording, const Route& route, const Quantized& codes, const TensorView& ids,
           const TensorView& weights);

} // namespace bellows::fp8
