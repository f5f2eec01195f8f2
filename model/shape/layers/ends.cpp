// SPDX-License-Identifier: MIT
// The embedding and the head with the final norm: the declarations.
#include "declare.hpp"

#include <bellows/engine/sizes.hpp>
#include <bellows/shape/vocabulary.hpp>

#include <algorithm>

namespace bellows {
namespace {

using namespace declare;

bool always(const ModelConfig&, std::uint64_t) {
    return true;
}
double nothing(const ModelConfig&, double) {
    return 0;
}

std::vector<ParameterInfo> embedding_parameters(const ModelConfig& c, std::uint64_t) {
    ParameterInfo table = matrix(c, "model.embed_tokens.weight", {c.vocabulary, c.hidden},
                                 ParameterKind::Embedding, -1);
    table.tied = c.embedding_at_both_ends();
    return {table};
}

std::vector<BufferInfo> embedding_buffers(const ModelConfig&, const SlotShape&) {
    return {};
}

std::vector<NodeInfo> embedding_nodes(const ModelConfig&, const SlotShape& s) {
    std::vector<NodeInfo> list = {{.name = "EMBED(F)", .kind = NodeKind::Forward}};
    if (s.training)
        list.push_back({.name = "EMBED(W)",
                        .kind = NodeKind::WeightGradient,
                        .scratch_bytes = ops::embedding_wgrad_workspace_bytes(s.tokens)});
    return list;
}

std::vector<ParameterInfo> head_parameters(const ModelConfig& c, std::uint64_t) {
    std::vector<ParameterInfo> list = {gain("model.norm.weight", c.hidden, -1)};
    if (c.tied_embeddings)
        return list;
    list.push_back(matrix(c, "lm_head.weight", {c.vocabulary, c.hidden}, ParameterKind::Head, -1));
    if (c.head_init_std > 0)
        list.back().init_std = c.head_init_std;
    return list;
}

std::vector<BufferInfo> head_buffers(const ModelConfig& c, const SlotShape& s) {
    if (!s.training)
        return {};
    return {
        plain("norm", s.activation, {s.tokens, c.hidden}),
        plain("inverse rms", DType::F32, {s.tokens}),
        plain("logit gradient", s.activation, {s.tokens, padded_vocabulary(c.vocabulary)}),
        plain("norm gradient", s.activation, {s.tokens, c.hidden}, MemoryCategory::DeferredWgrad)};
}

std::vector<NodeInfo> head_nodes(const ModelConfig& c, const SlotShape& s) {
    if (!s.training)
        return {
            {.name = "HEAD(F)",
             .kind = NodeKind::Forward,
             .scratch_bytes = s.tokens * (c.hidden * size_of(s.activation) + size_of(DType::F32))}};
    const std::uint64_t logits = // in place where the gradient is f32
        s.activation == DType::F32
            ? 0
            : std::min(s.tokens, kLogitRows) * padded_vocabulary(c.vocabulary);
    return {{.name = "HEAD(F)",
             .kind = NodeKind::Forward,
             .scratch_bytes = (s.tokens + logits) * size_of(DType::F32) +
                              ops::sum_pairs_workspace_bytes(s.tokens)},
            {.name = "HEAD(B)", .kind = NodeKind::InputGradient},
            {.name = "HEAD(W)",
             .kind = NodeKind::WeightGradient,
             .scratch_bytes = ops::rmsnorm_wgrad_workspace_bytes(s.tokens, c.hidden)}};
}

} // namespace

LayerKind embedding_layer() noexcept {
    return {.name = "embedding",
            .place = LayerPlace::Front,
            .stands_in = always,
            .parameters = embedding_parameters,
            .buffers = embedding_buffers,
            .nodes = embedding_nodes,
            .other_flops = nothing};
}

LayerKind head_layer() noexcept {
    return {.name = "head",
            .place = LayerPlace::Back,
            .stands_in = always,
            .parameters = head_parameters,
            .buffers = head_buffers,
            .nodes = head_nodes,
            .other_flops = nothing};
}

} // namespace bellows
