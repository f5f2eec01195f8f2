// SPDX-License-Identifier: MIT
#include <bellows/shape/layer.hpp>
#include <bellows/shape/parameters.hpp>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace bellows {
namespace {

std::uint64_t fnv1a(const std::string& text) {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const char c : text)
        hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
}

std::uint64_t mix(std::uint64_t x) { // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

} // namespace

const char* to_string(ParameterKind kind) noexcept {
    switch (kind) {
    case ParameterKind::Embedding:
        return "embedding";
    case ParameterKind::Head:
        return "head";
    case ParameterKind::Norm:
        return "norm";
    case ParameterKind::Attention:
        return "attention";
    case ParameterKind::Ffn:
        return "ffn";
    case ParameterKind::Expert:
        return "expert";
    case ParameterKind::Projection:
        return "projection";
    case ParameterKind::Router:
        return "router";
    case ParameterKind::RouterBias:
        return "router_bias";
    }
    return "unknown";
}

std::uint64_t ParameterInfo::size() const noexcept {
    std::uint64_t product = 1;
    for (const std::uint64_t extent : shape)
        product *= extent;
    return product;
}

std::vector<ParameterInfo> parameters(const ModelConfig& config) {
    return parameters(config, layer_kinds());
}

std::vector<ParameterInfo> parameters(const ModelConfig& config, LayerTable kinds) {
    validate(config);
    std::vector<ParameterInfo> list;
    for (const PlacedLayer& placed : placed_layers(config, 0, 1, kinds))
        std::ranges::move(placed.kind->parameters(config, placed.layer), std::back_inserter(list));
    return list;
}

ParameterCount count_parameters(const ModelConfig& config) {
    return count_parameters(config, layer_kinds());
}

ParameterCount count_parameters(const ModelConfig& config, LayerTable kinds) {
    ParameterCount count;
    std::uint64_t routed = 0;
    for (const ParameterInfo& p : parameters(config, kinds)) {
        const std::uint64_t size = p.size();
        const bool first_dense = p.layer == 0 && !config.is_moe(0);
        const bool first_moe = p.layer == static_cast<std::int64_t>(config.dense_layers);
        const bool in_mlp = p.name.find(".mlp.") != std::string::npos;
        count.total += size;
        if (p.kind == ParameterKind::Expert)
            routed += size;
        if (p.kind == ParameterKind::Embedding || p.kind == ParameterKind::Head)
            count.embedding += size;
        if (p.layer == 0 && p.name.find(".self_attn.") != std::string::npos)
            count.attention_per_layer += size;
        if (first_dense && in_mlp)
            count.dense_ffn_per_layer += size;
        if (first_moe && in_mlp)
            count.moe_per_layer += size;
        if (first_moe && p.expert == 0)
            count.expert += size;
    }
    count.active = count.total;
    if (routed > 0)
        count.active -= routed / config.routed_experts * (config.routed_experts - config.top_k);
    return count;
}

std::vector<float> initial_values(const ParameterInfo& info, std::uint64_t seed) {
    std::vector<float> values(info.size());
    fill_initial_values(info, seed, values);
    return values;
}

void fill_initial_values(const ParameterInfo& info, std::uint64_t seed, std::span<float> values,
                         std::uint64_t first) {
    std::ranges::fill(values, static_cast<float>(info.init_mean));
    if (info.init_std == 0)
        return;
    const std::uint64_t key = mix(fnv1a(info.name) + mix(seed + 0x9e3779b97f4a7c15u));
    for (std::uint64_t i = 0; i < values.size(); ++i) {
        std::int64_t sum = 0; // of twelve 16-bit uniforms: variance 2^32 up to 1 part in 2^32
        for (std::uint64_t draw = 0; draw < 3; ++draw) {
            const std::uint64_t bits =
                mix(key + (3 * (first + i) + draw + 1) * 0x9e3779b97f4a7c15u);
            for (int part = 0; part < 4; ++part)
                sum += static_cast<std::int64_t>((bits >> (16 * part)) & 0xffff);
        }
        const double normal = (static_cast<double>(sum) - 6 * 65535.0) / 65536.0;
        values[i] = static_cast<float>(info.init_mean + info.init_std * normal);
    }
}

bool kept_in_f32(const ParameterInfo& info) noexcept {
    return info.kind != ParameterKind::Expert && !(info.trainable() && info.weight_decay);
}

bool is_linear(const ParameterInfo& info) noexcept {
    return info.kind == ParameterKind::Attention || info.kind == ParameterKind::Ffn ||
           info.kind == ParameterKind::Expert;
}

} // namespace bellows
