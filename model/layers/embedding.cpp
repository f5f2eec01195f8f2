// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/model/embedding.hpp>

namespace bellows {

namespace {

constexpr const char* kTable = "model.embed_tokens.weight";

class EmbeddingSlot final : public RecordedSlot {
public:
    EmbeddingSlot(const ParameterStore& parameters, LayerScratch& scratch,
                  const EmbeddingSlotDesc& desc)
        : RecordedSlot(
              "embedding", {},
              slot_shape(parameters, desc.tokens.extent[0], 1, static_cast<bool>(desc.dx.buffer)),
              parameters.device(), scratch, desc.name) {
        const Parameter& table = parameters.at(kTable);
        record("EMBED(F)", [&](Recording& r, Arena::Frame&) {
            ops::embedding_forward(r, desc.tokens, table.compute, desc.x);
        });
        if (!desc.dx.buffer)
            return;
        record("EMBED(W)", [&](Recording& r, Arena::Frame& frame) {
            const std::uint64_t tokens = desc.tokens.extent[0];
            ops::embedding_wgrad(r, desc.tokens, desc.dx, table.gradient, true,
                                 frame.bytes(ops::embedding_wgrad_workspace_bytes(tokens)));
        });
    }
};

} // namespace

Embedding::Embedding(ParameterStore& parameters, LayerScratch& scratch)
    : parameters_(&parameters), scratch_(&scratch) {
    parameters.at(kTable); // throws early
}

std::unique_ptr<LayerSlot> Embedding::create_slot(const EmbeddingSlotDesc& desc) const {
    return std::make_unique<EmbeddingSlot>(*parameters_, *scratch_, desc);
}

} // namespace bellows
