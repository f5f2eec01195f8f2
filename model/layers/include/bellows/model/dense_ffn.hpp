// SPDX-License-Identifier: MIT
#pragma once

// The dense FFN of a layer: y = x + down(swiglu(gate_up(RMSNorm(x)))). Nodes: MLP(F), MLP(B),
// MLP(W). MLP(B) writes dx and keeps what MLP(W) needs, which adds to ParameterStore's gradients
// and reads the slot's x and dy as well. One thread at a time.

#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <memory>

namespace bellows {

class DenseFfn final : public Layer {
public:
    /// All must outlive it and its slots. Throws Error{InvalidArgument} when the store lacks a
    /// parameter of the layer.
    DenseFfn(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
             LayerScratch& scratch);
    ~DenseFfn() override;

    /// Throws Error{InvalidArgument} when the tensors are not [tokens, hidden] in the activations'
    /// type.
    std::unique_ptr<LayerSlot> create_slot(const SlotDesc& desc) override;

    struct Impl; ///< internal

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
