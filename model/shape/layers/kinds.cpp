// SPDX-License-Identifier: MIT
// The table of layer kinds, and what follows from a declaration of any kind.
#include "declare.hpp"

#include <bellows/base/error.hpp>
#include <bellows/shape/stages.hpp>

#include <algorithm>
#include <array>

namespace bellows {

LayerTable layer_kinds() noexcept {
    static const std::array kinds = {
        embedding_layer(), //
        mtp_input(),       //
        mla_attention(),   //
        gqa_attention(),   //
        dense_ffn(),       //
        moe_ffn(),         //
        mtp_head(),        //
        head_layer(),      //
    };
    return kinds;
}

const LayerKind& layer_kind(const std::string& name) {
    std::string known;
    for (const LayerKind& kind : layer_kinds()) {
        if (kind.name == name)
            return kind;
        known += (known.empty() ? "" : ", ") + std::string(kind.name);
    }
    throw Error(ErrorCode::InvalidArgument,
                "no kind of layer is named " + name + "; there are " + known);
}

std::vector<PlacedLayer> placed_layers(const ModelConfig& config, std::uint64_t stage,
                                       std::uint64_t num_stages, LayerTable kinds) {
    std::vector<PlacedLayer> placed;
    const auto place = [&](LayerPlace where, std::uint64_t layer) {
        for (const LayerKind& kind : kinds)
            if (kind.place == where && kind.stands_in(config, layer))
                placed.push_back({&kind, layer});
    };
    if (stage == 0)
        place(LayerPlace::Front, 0);
    const LayerRange range = layers_of_stage(config, stage, num_stages);
    for (std::uint64_t layer = range.first; layer < range.end; ++layer)
        place(LayerPlace::Body, layer);
    if (stage + 1 != num_stages)
        return placed;
    place(LayerPlace::Back, 0);
    for (std::uint64_t layer = config.layers; layer < config.all_layers(); ++layer)
        for (const LayerPlace where :
             {LayerPlace::ModuleFront, LayerPlace::Body, LayerPlace::ModuleBack})
            place(where, layer);
    return placed;
}

std::uint64_t BufferInfo::bytes(std::uint64_t arriving) const {
    const std::uint64_t most = extents.empty() ? 0 : extents.front();
    const std::uint64_t now = rows == RowCount::Fixed ? most : std::min(arriving, most);
    if (storage == Storage::Plain) {
        std::uint64_t each = size_of(dtype);
        for (std::size_t i = 1; i < extents.size(); ++i)
            each *= extents[i];
        return now * each;
    }
    const std::uint64_t columns = extents.at(1);
    if (storage == Storage::Fp8Rows)
        return fp8::quantized_bytes(kRowsRecipe, {now, columns});
    // Columns' scales have memory for all rows that could come.
    return fp8::codes_bytes({now, columns}) +
           fp8::scales_bytes(kColumnsRecipe, {most, columns}, groups);
}

BufferInfo residual_stream(const ModelConfig& config, const SlotShape& shape) {
    return declare::plain("residual stream", shape.activation, {shape.tokens, config.hidden});
}

BufferInfo residual_gradient(const ModelConfig& config, const SlotShape& shape) {
    return declare::plain("gradient stream", shape.activation, {shape.tokens, config.hidden},
                          MemoryCategory::DeferredWgrad);
}

} // namespace bellows
