// SPDX-License-Identifier: MIT
#pragma once

// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of a layer: y = x + MLA(RMSNorm(x)).
// Queries come from the hidden state, straight or through a normalised latent; keys and values from
// another normalised latent; a part of each query and one key part that all heads share carry the
// position by rotation. Nodes: ATTN(F), ATTN(B), ATTN(W). ATTN(B) writes dx and keeps what ATTN(W)
// needs, which adds to ParameterStore's gradients and reads the slot's x and dy as well. One thread
// at a time.

#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/model/rope_table.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <memory>

namespace bellows {

class MlaAttention final : public Layer {
public:
    /// All must outlive it and its slots. Throws Error{InvalidArgument} when the store lacks a
    /// parameter of the layer.
    MlaAttention(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
                 const RopeTable& positions, LayerScratch& scratch);
    ~MlaAttention() override;

    /// Throws Error{InvalidArgument} when tokens are not whole sequences of seq, when seq exceeds
    /// the table or the tensors are not [tokens, hidden] in the activations' type.
    std::unique_ptr<LayerSlot> create_slot(const SlotDesc& desc) override;

    struct Impl; ///< internal

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
