// SPDX-License-Identifier: MIT
// Grouped-query attention with its norm: the declaration.
#include "declare.hpp"

#include <bellows/engine/sizes.hpp>

#include <algorithm>

namespace bellows {
namespace {

using namespace declare;

std::uint64_t query_columns(const ModelConfig& c) {
    return c.heads * c.head_dim;
}
std::uint64_t key_columns(const ModelConfig& c) { // and those of values
    return c.kv_heads * c.head_dim;
}
/// Whether ATTN(F) keeps queries, keys and values; else ATTN(B) computes them again. Those that
/// have norms are kept as they were before these.
bool keeps_heads(const ModelConfig& c, const SlotShape& s) {
    return !s.fp8() || c.qk_norm;
}

std::vector<ParameterInfo> parameters_of(const ModelConfig& c, std::uint64_t layer) {
    const std::string prefix = prefix_of(layer) + "self_attn.";
    const auto index = static_cast<std::int64_t>(layer);
    std::vector<ParameterInfo> list = {
        gain(prefix_of(layer) + "input_layernorm.weight", c.hidden, index)};
    const auto add = [&](const char* name, std::uint64_t out, std::uint64_t in) {
        list.push_back(
            matrix(c, prefix + name + ".weight", {out, in}, ParameterKind::Attention, index));
    };
    add("q_proj", query_columns(c), c.hidden);
    add("k_proj", key_columns(c), c.hidden);
    add("v_proj", key_columns(c), c.hidden);
    if (c.qk_norm) {
        list.push_back(gain(prefix + "q_norm.weight", c.head_dim, index));
        list.push_back(gain(prefix + "k_norm.weight", c.head_dim, index));
    }
    add("o_proj", c.hidden, query_columns(c));
    return list;
}

std::vector<BufferInfo> buffers_of(const ModelConfig& c, const SlotShape& s) {
    const std::uint64_t tokens = s.tokens;
    std::vector<BufferInfo> list = {linear_input(s, "norm", tokens, c.hidden),
                                    plain("inverse rms", DType::F32, {tokens})};
    const auto heads = [&](const char* name, std::uint64_t count,
                           MemoryCategory category = MemoryCategory::Activations) {
        list.push_back(plain(name, s.activation, {tokens, count, c.head_dim}, category));
    };
    if (keeps_heads(c, s)) {
        heads("queries", c.heads);
        heads("keys", c.kv_heads);
        heads("values", c.kv_heads);
    }
    if (c.qk_norm) {
        list.push_back(plain("query inverse rms", DType::F32, {tokens * c.heads}));
        list.push_back(plain("key inverse rms", DType::F32, {tokens * c.kv_heads}));
    }
    heads("attention", c.heads);
    list.push_back(plain("attention log-sum", DType::F32, {tokens, c.heads}));
    if (!s.training)
        return list;
    list.push_back(
        plain("norm gradient", s.activation, {tokens, c.hidden}, MemoryCategory::DeferredWgrad));
    if (c.qk_norm) {
        heads("query norm gradient", c.heads, MemoryCategory::DeferredWgrad);
        heads("key norm gradient", c.kv_heads, MemoryCategory::DeferredWgrad);
    }
    if (s.fp8()) {
        list.push_back(linear_gradient("query gradient", s, tokens, query_columns(c)));
        list.push_back(linear_gradient("key gradient", s, tokens, key_columns(c)));
        list.push_back(linear_gradient("value gradient", s, tokens, key_columns(c)));
    } else if (c.qk_norm) { // else they take the places of queries and keys
        heads("query gradient", c.heads, MemoryCategory::DeferredWgrad);
        heads("key gradient", c.kv_heads, MemoryCategory::DeferredWgrad);
    }
    return list;
}

/// Of queries, keys and values that live within a node.
std::uint64_t heads_scratch(const ModelConfig& c, const SlotShape& s) {
    const std::uint64_t columns = (c.qk_norm ? query_columns(c) + key_columns(c) : 0) + // rotated
                                  (keeps_heads(c, s) ? 0 : query_columns(c) + 2 * key_columns(c));
    return s.tokens * columns * size_of(s.activation);
}

/// Of the operands of one FP8 product.
std::uint64_t product_scratch(const ModelConfig& c, const SlotShape& s) {
    if (!s.fp8())
        return 0;
    return s.tokens * 2 * std::max(query_columns(c), c.hidden) * size_of(s.activation) +
           (s.f32_scales ? query_columns(c) * c.hidden * size_of(DType::F32) : 0);
}

std::uint64_t input_gradient_scratch(const ModelConfig& c, const SlotShape& s) {
    // The gradients of queries, keys and values, and of attention's output.
    std::uint64_t bytes =
        heads_scratch(c, s) + product_scratch(c, s) +
        s.tokens * 2 * (query_columns(c) + key_columns(c)) * size_of(s.activation) +
        ops::attention_dgrad_workspace_bytes(s.tokens, c.heads);
    if (s.fp8())
        bytes += quantized_bytes(s.tokens, query_columns(c)) +
                 2 * quantized_bytes(s.tokens, key_columns(c));
    return bytes;
}

std::uint64_t weight_gradient_scratch(const ModelConfig& c, const SlotShape& s) {
    std::uint64_t bytes = ops::rmsnorm_wgrad_workspace_bytes(s.tokens, c.hidden);
    if (c.qk_norm)
        bytes += ops::rmsnorm_wgrad_workspace_bytes(s.tokens * c.heads, c.head_dim) +
                 ops::rmsnorm_wgrad_workspace_bytes(s.tokens * c.kv_heads, c.head_dim);
    if (!s.fp8())
        return bytes;
    return bytes + 2 * quantized_bytes(s.tokens, c.hidden) +
           quantized_bytes(s.tokens, query_columns(c)) +
           s.tokens * (c.hidden + query_columns(c)) * 2;
}

std::vector<NodeInfo> nodes_of(const ModelConfig& c, const SlotShape& s) {
    return attention_nodes(s, heads_scratch(c, s) + product_scratch(c, s),
                           input_gradient_scratch(c, s), weight_gradient_scratch(c, s));
}

double other_flops(const ModelConfig& c, double visible_keys) {
    return 4 * double(query_columns(c)) * visible_keys;
}

} // namespace

LayerKind gqa_attention() noexcept {
    return {.name = "gqa",
            .place = LayerPlace::Body,
            .stands_in = [](const ModelConfig& c, std::uint64_t) { return !c.is_mla(); },
            .parameters = parameters_of,
            .buffers = buffers_of,
            .nodes = nodes_of,
            .other_flops = other_flops};
}

} // namespace bellows
