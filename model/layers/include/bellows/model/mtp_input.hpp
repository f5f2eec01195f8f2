// SPDX-License-Identifier: MIT
#pragma once

// What a module of multi-token prediction (MTP) begins with: from the state behind the norm of the
// head before it, and from the embedding of a later token, it makes what enters the module's layer:
// y = W * [RMSNorm(embedding) ; RMSNorm(state)]. Nodes: MTP_IN(F), MTP_IN(B), MTP_IN(W); MTP_IN(W)
// adds to ParameterStore's gradients, to that of the embedding's table, too. One thread at a time.

#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <memory>
#include <string>

namespace bellows {

/// The caller owns the tensors.
struct MtpInputSlotDesc {
    std::string name;  ///< e.g. "module 0 slot 1"
    TensorView tokens; ///< [tokens] u32, below the vocabulary; begins at a multiple of 16 bytes
    /// x: the state; dx: written by MTP_IN(B). Both are HeadSlotParts' of the head before it.
    LayerTensors tensors;
};

class MtpInput final {
public:
    /// layer: the number of the module's layer. All must outlive it and its slots.
    MtpInput(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
             LayerScratch& scratch);
    ~MtpInput();

    std::unique_ptr<LayerSlot> create_slot(const MtpInputSlotDesc& desc) const;

    struct Impl; ///< internal

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
