// SPDX-License-Identifier: MIT
#pragma once

// One MoE layer out of Bellows' ops: y[t] = sum over the token's experts of weight * FFN_e(x[t]).

#include <bellows/engine/gemm.hpp>
#include <bellows/engine/ops.hpp>

#include <vector>

struct MoeLayer {
    bellows::Device& device;
    std::uint64_t tokens, hidden, ffn, experts, top_k;
    std::vector<bellows::Buffer> buffers{};

    bellows::TensorView tensor(bellows::DType dtype, std::initializer_list<std::uint64_t> extents) {
        std::uint64_t bytes = bellows::size_of(dtype);
        for (const std::uint64_t extent : extents)
            bytes *= extent;
        buffers.emplace_back(device, bellows::BufferDesc{.name = "moe layer", .bytes = bytes});
        return buffers.back().tensor(dtype, extents);
    }

    /// x, y: [tokens, hidden]; router: [experts, hidden]; gate_up: [experts, 2 ffn, hidden];
    /// down: [experts, hidden, ffn]; all f32.
    void record(bellows::Recording& r, const bellows::TensorView& x,
                const bellows::TensorView& router, const bellows::TensorView& gate_up,
                const bellows::TensorView& down, const bellows::TensorView& y) {
        using enum bellows::DType;
        namespace ops = bellows::ops;
        const std::uint64_t rows = ops::moe_capacity(tokens, top_k, experts, 1);
        const auto logits = tensor(F32, {tokens, experts}), scores = tensor(F32, {tokens, experts});
        const auto ids = tensor(I32, {tokens, top_k}), weights = tensor(F32, {tokens, top_k});
        ops::gemm_nt(r, x, router, logits);
        ops::router_forward(r, logits, {}, scores, ids, weights, {});

        ops::MoeLayout layout{tensor(U32, {experts}), tensor(U32, {experts + 1}),
                              tensor(I32, {rows}), tensor(I32, {tokens, top_k})};
        ops::moe_layout(
            r, ids, layout,
            tensor(U8, {ops::moe_layout_workspace_bytes(tokens, top_k, experts)}).buffer);
        const auto in = tensor(F32, {rows, hidden}), out = tensor(F32, {rows, hidden});
        const auto wide = tensor(F32, {rows, 2 * ffn}), narrow = tensor(F32, {rows, ffn});
        ops::moe_gather(r, x, layout, {}, in);
        const auto tiles = ops::make_group_tiles(
            r, layout.offsets, rows, {2 * ffn, hidden, 0, 0},
            tensor(U8, {ops::group_tiles_bytes(device, rows, experts)}).buffer);
        ops::grouped_gemm_nt(r, in, gate_up, wide, tiles);
        ops::swiglu_forward(r, wide.with_row_count(layout.row_count()), {},
                            narrow.with_row_count(layout.row_count()));
        ops::grouped_gemm_nt(r, narrow, down, out, tiles);
        ops::moe_unpermute(r, out, layout, weights, y, false);
    }
};
