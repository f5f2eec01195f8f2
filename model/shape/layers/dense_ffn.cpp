// SPDX-License-Identifier: MIT
// The dense FFN of a layer with its norm: the declaration.
#include "declare.hpp"

#include <bellows/engine/sizes.hpp>

namespace bellows {
namespace {

using namespace declare;

std::vector<ParameterInfo> parameters_of(const ModelConfig& c, std::uint64_t layer) {
    const auto index = static_cast<std::int64_t>(layer);
    std::vector<ParameterInfo> list = {
        gain(prefix_of(layer) + "post_attention_layernorm.weight", c.hidden, index)};
    add_ffn(list, c, prefix_of(layer) + "mlp.", c.dense_ffn, ParameterKind::Ffn, index);
    return list;
}

std::vector<BufferInfo> buffers_of(const ModelConfig& c, const SlotShape& s) {
    std::vector<BufferInfo> list = {linear_input(s, "norm", s.tokens, c.hidden),
                                    plain("inverse rms", DType::F32, {s.tokens})};
    add_swiglu(list, s, "", c.dense_ffn);
    if (s.training)
        list.push_back(plain("norm gradient", s.activation, {s.tokens, c.hidden},
                             MemoryCategory::DeferredWgrad));
    return list;
}

std::vector<NodeInfo> nodes_of(const ModelConfig& c, const SlotShape& s) {
    const std::uint64_t in_fp8 = s.fp8() ? fp8_ffn_scratch(c, s, s.tokens, c.dense_ffn, 1) : 0;
    std::vector<NodeInfo> list = {
        {.name = "FFN(F)", .kind = NodeKind::Forward, .scratch_bytes = in_fp8}};
    if (!s.training)
        return list;
    list.push_back({.name = "FFN(B)",
                    .kind = NodeKind::InputGradient,
                    .scratch_bytes = s.tokens * c.dense_ffn * size_of(s.activation) + in_fp8});
    list.push_back(
        {.name = "FFN(W)",
         .kind = NodeKind::WeightGradient,
         .scratch_bytes =
             ops::rmsnorm_wgrad_workspace_bytes(s.tokens, c.hidden) +
             (s.fp8() ? fp8_ffn_weight_gradient_scratch(c, s, s.tokens, c.dense_ffn, 1) : 0)});
    return list;
}

} // namespace

LayerKind dense_ffn() noexcept {
    return {.name = "dense_ffn",
            .place = LayerPlace::Body,
            .stands_in = [](const ModelConfig& c, std::uint64_t layer) { return !c.is_moe(layer); },
            .parameters = parameters_of,
            .buffers = buffers_of,
            .nodes = nodes_of,
            .other_flops = [](const ModelConfig&, double) { return 0.0; }};
}

} // namespace bellows
