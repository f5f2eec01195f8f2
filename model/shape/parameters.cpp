// SPDX-License-Identifier: MIT
#include <bellows/shape/parameters.hpp>

#include <algorithm>
#include <cmath>

namespace bellows {
namespace {

using Shape = std::vector<std::uint64_t>;

class ListBuilder {
public:
    explicit ListBuilder(const ModelConfig& config) : config_(config) {}

    std::vector<ParameterInfo> build() {
        matrix("model.embed_tokens.weight", {config_.vocabulary, config_.hidden},
               ParameterKind::Embedding);
        for (layer_ = 0; layer_ < static_cast<std::int64_t>(config_.layers); ++layer_) {
            const std::string prefix = "model.layers." + std::to_string(layer_) + ".";
            gain(prefix + "input_layernorm.weight", config_.hidden);
            attention(prefix + "self_attn.");
            gain(prefix + "post_attention_layernorm.weight", config_.hidden);
            if (config_.is_moe(static_cast<std::uint64_t>(layer_)))
                moe(prefix + "mlp.");
            else
                ffn(prefix + "mlp.", config_.dense_ffn, ParameterKind::Ffn);
        }
        layer_ = -1;
        gain("model.norm.weight", config_.hidden);
        if (!config_.tied_embeddings)
            matrix("lm_head.weight", {config_.vocabulary, config_.hidden}, ParameterKind::Head);
        if (!config_.tied_embeddings && config_.head_init_std > 0)
            list_.back().init_std = config_.head_init_std;
        return std::move(list_);
    }

private:
    void matrix(std::string name, Shape shape, ParameterKind kind, std::int64_t expert = -1) {
        list_.push_back(
            {std::move(name), std::move(shape), kind, layer_, expert, 0, config_.init_std, true});
    }

    void gain(std::string name, std::uint64_t size) {
        list_.push_back({std::move(name), {size}, ParameterKind::Norm, layer_, -1, 1, 0, false});
    }

    void attention(const std::string& prefix) {
        const std::uint64_t q_out = config_.heads * config_.qk_head_dim();
        const auto kind = ParameterKind::Attention;
        if (config_.q_lora_rank == 0) {
            matrix(prefix + "q_proj.weight", {q_out, config_.hidden}, kind);
        } else {
            matrix(prefix + "q_a_proj.weight", {config_.q_lora_rank, config_.hidden}, kind);
            gain(prefix + "q_a_layernorm.weight", config_.q_lora_rank);
            matrix(prefix + "q_b_proj.weight", {q_out, config_.q_lora_rank}, kind);
        }
        matrix(prefix + "kv_a_proj_with_mqa.weight",
               {config_.kv_lora_rank + config_.qk_rope_head_dim, config_.hidden}, kind);
        gain(prefix + "kv_a_layernorm.weight", config_.kv_lora_rank);
        matrix(
            prefix + "kv_b_proj.weight",
            {config_.heads * (config_.qk_nope_head_dim + config_.v_head_dim), config_.kv_lora_rank},
            kind);
        matrix(prefix + "o_proj.weight", {config_.hidden, config_.heads * config_.v_head_dim},
               kind);
    }

    void ffn(const std::string& prefix, std::uint64_t width, ParameterKind kind,
             std::int64_t expert = -1) {
        matrix(prefix + "gate_up_proj.weight", {2 * width, config_.hidden}, kind, expert);
        matrix(prefix + "down_proj.weight", {config_.hidden, width}, kind, expert);
    }

    void moe(const std::string& prefix) {
        matrix(prefix + "gate.weight", {config_.routed_experts, config_.hidden},
               ParameterKind::Router);
        if (config_.router_bias)
            list_.push_back({prefix + "gate.e_score_correction_bias",
                             {config_.routed_experts},
                             ParameterKind::RouterBias,
                             layer_,
                             -1,
                             0,
                             0,
                             false});
        for (std::uint64_t e = 0; e < config_.routed_experts; ++e)
            ffn(prefix + "experts." + std::to_string(e) + ".", config_.moe_ffn,
                ParameterKind::Expert, static_cast<std::int64_t>(e));
        if (config_.shared_experts > 0)
            ffn(prefix + "shared_experts.", config_.shared_ffn(), ParameterKind::Ffn);
    }

    const ModelConfig& config_;
    std::int64_t layer_ = -1;
    std::vector<ParameterInfo> list_;
};

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
    validate(config);
    return ListBuilder(config).build();
}

ParameterCount count_parameters(const ModelConfig& config) {
    ParameterCount count;
    std::uint64_t routed = 0;
    for (const ParameterInfo& p : parameters(config)) {
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

double training_flops_per_token(const ModelConfig& config, std::uint64_t sequence) {
    double elements = config.tied_embeddings ? double(config.vocabulary * config.hidden) : 0.0;
    for (const ParameterInfo& p : parameters(config)) {
        if (p.shape.size() != 2 || p.kind == ParameterKind::Embedding)
            continue;
        const bool routed = p.kind == ParameterKind::Expert;
        elements += double(p.size()) *
                    (routed ? double(config.top_k) / double(config.routed_experts) : 1.0);
    }
    const double visible_keys = (double(sequence) + 1) / 2;
    const double attention =
        double(config.layers * config.heads * (config.qk_head_dim() + config.v_head_dim)) *
        visible_keys;
    return 6 * (elements + attention);
}

std::vector<float> initial_values(const ParameterInfo& info, std::uint64_t seed) {
    std::vector<float> values(info.size());
    fill_initial_values(info, seed, values);
    return values;
}

void fill_initial_values(const ParameterInfo& info, std::uint64_t seed, std::span<float> values) {
    std::ranges::fill(values, static_cast<float>(info.init_mean));
    if (info.init_std == 0)
        return;
    const std::uint64_t key = mix(fnv1a(info.name) + mix(seed + 0x9e3779b97f4a7c15u));
    for (std::uint64_t i = 0; i < values.size(); ++i) {
        std::int64_t sum = 0; // of twelve 16-bit uniforms: variance 2^32 up to 1 part in 2^32
        for (std::uint64_t draw = 0; draw < 3; ++draw) {
            const std::uint64_t bits = mix(key + (3 * i + draw + 1) * 0x9e3779b97f4a7c15u);
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
