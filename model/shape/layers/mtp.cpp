// SPDX-License-Identifier: MIT
// A module of multi-token prediction, without its layer: the declarations of what stands ahead of
// the layer and of the head behind it.
#include "declare.hpp"

#include <bellows/engine/sizes.hpp>
#include <bellows/shape/vocabulary.hpp>

namespace bellows {
namespace {

using namespace declare;

bool is_module(const ModelConfig& c, std::uint64_t layer) {
    return layer >= c.layers;
}

std::vector<ParameterInfo> input_parameters(const ModelConfig& c, std::uint64_t layer) {
    const std::string prefix = prefix_of(layer);
    const auto index = static_cast<std::int64_t>(layer);
    return {gain(prefix + "enorm.weight", c.hidden, index),
            gain(prefix + "hnorm.weight", c.hidden, index),
            matrix(c, prefix + "eh_proj.weight", {c.hidden, 2 * c.hidden},
                   ParameterKind::Projection, index)};
}

std::vector<BufferInfo> input_buffers(const ModelConfig& c, const SlotShape& s) {
    std::vector<BufferInfo> list = {
        plain("embedding and state", s.activation, {s.tokens, 2 * c.hidden}),
        plain("embedding inverse rms", DType::F32, {s.tokens}),
        plain("state inverse rms", DType::F32, {s.tokens})};
    if (s.training)
        list.push_back(plain("embedding and state gradient", s.activation, {s.tokens, 2 * c.hidden},
                             MemoryCategory::DeferredWgrad));
    return list;
}

std::vector<NodeInfo> input_nodes(const ModelConfig& c, const SlotShape& s) {
    const std::uint64_t rows = s.tokens * c.hidden * size_of(s.activation);
    std::vector<NodeInfo> list = {
        {.name = "MTP_IN(F)", .kind = NodeKind::Forward, .scratch_bytes = rows}};
    if (!s.training)
        return list;
    list.push_back({.name = "MTP_IN(B)", .kind = NodeKind::InputGradient});
    list.push_back({.name = "MTP_IN(W)",
                    .kind = NodeKind::WeightGradient,
                    .scratch_bytes = 2 * rows + ops::embedding_wgrad_workspace_bytes(s.tokens) +
                                     2 * ops::rmsnorm_wgrad_workspace_bytes(s.tokens, c.hidden)});
    return list;
}

double nothing(const ModelConfig&, double) {
    return 0;
}

std::vector<ParameterInfo> head_parameters(const ModelConfig& c, std::uint64_t layer) {
    return {gain(prefix_of(layer) + "shared_head.norm.weight", c.hidden,
                 static_cast<std::int64_t>(layer))};
}

std::vector<BufferInfo> head_buffers(const ModelConfig& c, const SlotShape& s) {
    return layer_kind("head").buffers(c, s);
}

std::vector<NodeInfo> head_nodes(const ModelConfig& c, const SlotShape& s) {
    std::vector<NodeInfo> nodes = layer_kind("head").nodes(c, s);
    for (NodeInfo& node : nodes)
        node.name = "MTP_" + node.name;
    return nodes;
}

} // namespace

LayerKind mtp_input() noexcept {
    return {.name = "mtp_input",
            .place = LayerPlace::ModuleFront,
            .stands_in = is_module,
            .parameters = input_parameters,
            .buffers = input_buffers,
            .nodes = input_nodes,
            .other_flops = nothing};
}

LayerKind mtp_head() noexcept {
    return {.name = "mtp_head",
            .place = LayerPlace::ModuleBack,
            .stands_in = is_module,
            .parameters = head_parameters,
            .buffers = head_buffers,
            .nodes = head_nodes,
            .other_flops = nothing};
}

} // namespace bellows
