// SPDX-License-Identifier: MIT
#pragma once

// Grouped-query attention (GQA), declared as a kind of layer from outside of model/shape: all that
// a new kind takes beside its row in a table. Its sizes are constants here, as no field of
// ModelConfig has them.

#include <bellows/engine/sizes.hpp>
#include <bellows/shape/layer.hpp>

namespace bellows::test {

inline constexpr std::uint64_t kKeyValueHeads = 2, kHeadDim = 64;

inline LayerKind gqa_attention() {
    LayerKind kind;
    kind.name = "gqa";
    kind.place = LayerPlace::Body;
    kind.stands_in = [](const ModelConfig&, std::uint64_t) { return true; };
    kind.parameters = [](const ModelConfig& c, std::uint64_t layer) {
        const std::string prefix = "model.layers." + std::to_string(layer) + ".";
        const auto index = static_cast<std::int64_t>(layer);
        std::vector<ParameterInfo> list = {
            {prefix + "input_layernorm.weight", {c.hidden}, ParameterKind::Norm, index, -1, 1}};
        const auto add = [&](const char* name, std::uint64_t out, std::uint64_t in) {
            list.push_back({prefix + "self_attn." + name + ".weight",
                            {out, in},
                            ParameterKind::Attention,
                            index,
                            -1,
                            0,
                            c.init_std,
                            true});
        };
        add("q_proj", c.heads * kHeadDim, c.hidden);
        add("k_proj", kKeyValueHeads * kHeadDim, c.hidden);
        add("v_proj", kKeyValueHeads * kHeadDim, c.hidden);
        add("o_proj", c.hidden, c.heads * kHeadDim);
        return list;
    };
    kind.buffers = [](const ModelConfig& c, const SlotShape& s) {
        const auto rows = [&](const char* name, std::uint64_t columns, MemoryCategory category) {
            return BufferInfo{.name = name,
                              .dtype = s.activation,
                              .extents = {s.tokens, columns},
                              .category = category};
        };
        constexpr auto kKept = MemoryCategory::Activations;
        std::vector<BufferInfo> list = {
            rows("norm", c.hidden, kKept),
            rows("queries", c.heads * kHeadDim, kKept),
            rows("keys and values", 2 * kKeyValueHeads * kHeadDim, kKept),
            rows("attention", c.heads * kHeadDim, kKept),
            {.name = "inverse rms", .extents = {s.tokens}},
            {.name = "attention log-sum", .extents = {s.tokens, c.heads}}};
        if (s.training)
            list.push_back(rows("norm gradient", c.hidden, MemoryCategory::DeferredWgrad));
        return list;
    };
    kind.nodes = [](const ModelConfig& c, const SlotShape& s) {
        std::vector<NodeInfo> list = {{.name = "ATTN(F)", .kind = NodeKind::Forward}};
        if (s.training) {
            list.push_back(
                {.name = "ATTN(B)",
                 .kind = NodeKind::InputGradient,
                 .scratch_bytes = ops::attention_dgrad_workspace_bytes(s.tokens, c.heads)});
            list.push_back({.name = "ATTN(W)", .kind = NodeKind::WeightGradient});
        }
        return list;
    };
    kind.other_flops = [](const ModelConfig& c, double visible_keys) {
        return 4 * double(c.heads * kHeadDim) * visible_keys;
    };
    return kind;
}

} // namespace bellows::test
