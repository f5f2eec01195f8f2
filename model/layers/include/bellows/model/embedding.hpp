// SPDX-License-Identifier: MIT
#pragma once

// The first layer of a model: x = table[token]. Nodes: EMBED(F), EMBED(W); EMBED(W) adds to
// ParameterStore's gradient of the table. One thread at a time.

#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/config.hpp>

#include <memory>
#include <string>

namespace bellows {

/// The caller owns the tensors.
struct EmbeddingSlotDesc {
    std::string name;  ///< e.g. "embedding slot 1"
    TensorView tokens; ///< [tokens] u32, below the vocabulary; begins at a multiple of 16 bytes
    TensorView x;      ///< out: [tokens, hidden] in the activations' type
    TensorView dx;     ///< gradient of x; left out: no EMBED(W)
};

class Embedding final {
public:
    /// All must outlive it and its slots.
    Embedding(ParameterStore& parameters, LayerScratch& scratch);

    std::unique_ptr<LayerSlot> create_slot(const EmbeddingSlotDesc& desc) const;

private:
    ParameterStore* parameters_;
    LayerScratch* scratch_;
};

} // namespace bellows
