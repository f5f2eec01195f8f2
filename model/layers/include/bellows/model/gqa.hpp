// SPDX-License-Identifier: MIT
#pragma once

// Grouped-query attention (Llama, Qwen3) of a layer: y = x + GQA(RMSNorm(x)). There are fewer heads
// of keys and values than of queries, and each serves as many of these. Every head's query and key
// may have a norm, and the whole of both is rotated by position. Nodes: ATTN(F), ATTN(B), ATTN(W).
// ATTN(B) writes dx and keeps what ATTN(W) needs, which adds to ParameterStore's gradients and
// reads the slot's x and dy as well. One thread at a time.

#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/model/rope_table.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <memory>

namespace bellows {

class GqaAttention final : public Layer {
public:
    /// All must outlive it and its slots. Throws Error{InvalidArgument} when the store lacks a
    /// parameter of the layer.
    GqaAttention(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
                 const RopeTable& positions, LayerScratch& scratch);
    ~GqaAttention() override;

    /// Throws Error{InvalidArgument} when tokens are not whole sequences of seq, when seq exceeds
    /// the table or the tensors are not [tokens, hidden] in the activations' type.
    std::unique_ptr<LayerSlot> create_slot(const SlotDesc& desc) override;

    struct Impl;

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
