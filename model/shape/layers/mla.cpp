// SPDX-License-Identifier: MIT
// Multi-head latent attention with its norm: the declaration.
#include "declare.hpp"

#include <bellows/engine/sizes.hpp>

#include <algorithm>

namespace bellows {
namespace {

using namespace declare;

std::uint64_t query_columns(const ModelConfig& c) {
    return c.heads * c.qk_head_dim();
}
std::uint64_t key_value_columns(const ModelConfig& c) {
    return c.heads * (c.qk_nope_head_dim + c.v_head_dim);
}

std::vector<ParameterInfo> parameters_of(const ModelConfig& c, std::uint64_t layer) {
    const std::string prefix = prefix_of(layer) + "self_attn.";
    const auto index = static_cast<std::int64_t>(layer);
    std::vector<ParameterInfo> list;
    const auto add = [&](const char* name, std::uint64_t out, std::uint64_t in) {
        list.push_back(
            matrix(c, prefix + name + ".weight", {out, in}, ParameterKind::Attention, index));
    };
    list.push_back(gain(prefix_of(layer) + "input_layernorm.weight", c.hidden, index));
    if (c.q_lora_rank == 0) {
        add("q_proj", query_columns(c), c.hidden);
    } else {
        add("q_a_proj", c.q_lora_rank, c.hidden);
        list.push_back(gain(prefix + "q_a_layernorm.weight", c.q_lora_rank, index));
        add("q_b_proj", query_columns(c), c.q_lora_rank);
    }
    add("kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, c.hidden);
    list.push_back(gain(prefix + "kv_a_layernorm.weight", c.kv_lora_rank, index));
    add("kv_b_proj", key_value_columns(c), c.kv_lora_rank);
    add("o_proj", c.hidden, c.heads * c.v_head_dim);
    return list;
}

std::vector<BufferInfo> buffers_of(const ModelConfig& c, const SlotShape& s) {
    const std::uint64_t tokens = s.tokens, kv = c.kv_lora_rank + c.qk_rope_head_dim;
    const DType act = s.activation;
    const bool low_rank_queries = c.q_lora_rank > 0;
    std::vector<BufferInfo> list = {linear_input(s, "norm", tokens, c.hidden),
                                    plain("inverse rms", DType::F32, {tokens})};
    if (low_rank_queries) {
        list.push_back(plain("query latent", act, {tokens, c.q_lora_rank}));
        list.push_back(linear_input(s, "query norm", tokens, c.q_lora_rank));
        list.push_back(plain("query inverse rms", DType::F32, {tokens}));
    }
    list.push_back(plain("key-value latent", act, {tokens, kv}));
    list.push_back(s.kv_up_in_fp8 ? linear_input(s, "key-value norm", tokens, c.kv_lora_rank)
                                  : plain("key-value norm", act, {tokens, c.kv_lora_rank}));
    list.push_back(plain("key-value inverse rms", DType::F32, {tokens}));
    if (!s.fp8()) { // else ATTN(B) computes them again
        list.push_back(plain("queries", act, {tokens, c.heads, c.qk_head_dim()}));
        list.push_back(
            plain("keys and values", act, {tokens, c.heads, c.qk_nope_head_dim + c.v_head_dim}));
    }
    list.push_back(plain("attention", act, {tokens, c.heads, c.v_head_dim}));
    list.push_back(plain("attention log-sum", DType::F32, {tokens, c.heads}));
    if (!s.training)
        return list;
    const auto add_gradient = [&](const char* name, std::uint64_t columns) {
        list.push_back(plain(name, act, {tokens, columns}, MemoryCategory::DeferredWgrad));
    };
    add_gradient("norm gradient", c.hidden);
    if (low_rank_queries) {
        add_gradient("query latent gradient", c.q_lora_rank);
        add_gradient("query norm gradient", c.q_lora_rank);
    }
    add_gradient("key-value latent gradient", kv);
    add_gradient("key-value norm gradient", c.kv_lora_rank);
    if (s.fp8()) { // else they take the places of queries, keys and values
        list.push_back(linear_gradient("query gradient", s, tokens, query_columns(c)));
        list.push_back(linear_gradient("key and value gradient", s, tokens, key_value_columns(c)));
    }
    return list;
}

std::uint64_t forward_scratch(const ModelConfig& c, const SlotShape& s) {
    const std::uint64_t queries = query_columns(c), act = size_of(s.activation);
    const std::uint64_t keys = s.tokens * queries * act;
    if (!s.fp8())
        return keys;
    // Also queries, keys and values, and a product's operands.
    const std::uint64_t widest =
        std::max({queries * (c.q_lora_rank == 0 ? c.hidden : c.q_lora_rank),
                  c.q_lora_rank * c.hidden, c.heads * c.v_head_dim * c.hidden});
    return keys + s.tokens * (3 * queries + key_value_columns(c)) * act +
           (s.f32_scales ? widest * size_of(DType::F32) : 0);
}

std::uint64_t input_gradient_scratch(const ModelConfig& c, const SlotShape& s) {
    const std::uint64_t queries = query_columns(c), act = size_of(s.activation);
    // Keys and the gradients of queries and keys; those of values and of attention's output.
    std::uint64_t bytes = s.tokens * (3 * queries + 2 * c.heads * c.v_head_dim) * act +
                          ops::attention_dgrad_workspace_bytes(s.tokens, c.heads);
    if (s.fp8()) // queries, keys and values again, quantised gradients, a product's operands
        bytes += s.tokens * (3 * queries + key_value_columns(c)) * act +
                 quantized_bytes(s.tokens, queries) +
                 quantized_bytes(s.tokens, key_value_columns(c));
    return bytes;
}

std::uint64_t weight_gradient_scratch(const ModelConfig& c, const SlotShape& s) {
    std::uint64_t bytes = ops::rmsnorm_wgrad_workspace_bytes(s.tokens, c.hidden) +
                          ops::rmsnorm_wgrad_workspace_bytes(s.tokens, c.kv_lora_rank);
    if (c.q_lora_rank > 0)
        bytes += ops::rmsnorm_wgrad_workspace_bytes(s.tokens, c.q_lora_rank);
    if (!s.fp8())
        return bytes;
    const std::uint64_t widest =
        std::max({query_columns(c), key_value_columns(c), c.heads * c.v_head_dim});
    return bytes + 2 * quantized_bytes(s.tokens, c.hidden) + quantized_bytes(s.tokens, widest) +
           s.tokens * (c.hidden + widest) * 2;
}

std::vector<NodeInfo> nodes_of(const ModelConfig& c, const SlotShape& s) {
    return attention_nodes(s, forward_scratch(c, s), input_gradient_scratch(c, s),
                           weight_gradient_scratch(c, s));
}

double other_flops(const ModelConfig& c, double visible_keys) {
    return 2 * double(c.heads * (c.qk_head_dim() + c.v_head_dim)) * visible_keys;
}

} // namespace

LayerKind mla_attention() noexcept {
    return {.name = "mla",
            .place = LayerPlace::Body,
            .stands_in = [](const ModelConfig& c, std::uint64_t) { return c.is_mla(); },
            .parameters = parameters_of,
            .buffers = buffers_of,
            .nodes = nodes_of,
            .other_flops = other_flops};
}

} // namespace bellows
