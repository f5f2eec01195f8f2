// SPDX-License-Identifier: MIT
#include "config_fields.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/mix.hpp>
#include <bellows/shape/rope.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>

namespace bellows {
namespace config_fields {
namespace {

// The upper limits keep every parameter count below 2^64.
constexpr double kMaxSize = 1048576;
using C = ModelConfig;
const Field kFields[] = {
    {"vocabulary", &C::vocabulary, true, 8, 16777216},
    {"hidden", &C::hidden, true, 8, kMaxSize, 8},
    {"layers", &C::layers, true, 1, 1024},
    {"dense_layers", &C::dense_layers, true, 0, 1024},
    {"mtp_depth", &C::mtp_depth, false, 0, 16},
    {"attention", &C::attention},
    {"heads", &C::heads, true, 1, 4096},
    {"q_lora_rank", &C::q_lora_rank, false, 0, kMaxSize, 8},
    {"kv_lora_rank", &C::kv_lora_rank, false, 0, kMaxSize, 8},
    {"qk_nope_head_dim", &C::qk_nope_head_dim, false, 0, 1024, 8},
    {"qk_rope_head_dim", &C::qk_rope_head_dim, false, 0, 1024, 8},
    {"v_head_dim", &C::v_head_dim, false, 0, 1024, 8},
    {"latent_norm_eps", &C::latent_norm_eps, false, 0, 1},
    {"kv_heads", &C::kv_heads, false, 0, 4096},
    {"head_dim", &C::head_dim, false, 0, 1024, 8},
    {"qk_norm", &C::qk_norm},
    {"rope_theta", &C::rope_theta, false, 1, 1e12},
    {"rope_scaling", &C::rope_scaling},
    {"rope_factor", &C::rope_factor, false, 1, 1e6},
    {"rope_original_context", &C::rope_original_context, false, 0, 1e9},
    {"rope_beta_fast", &C::rope_beta_fast, false, 1e-3, 1e6},
    {"rope_beta_slow", &C::rope_beta_slow, false, 1e-3, 1e6},
    {"rope_truncate", &C::rope_truncate},
    {"rope_mscale", &C::rope_mscale, false, 0, 100},
    {"rope_mscale_all_dim", &C::rope_mscale_all_dim, false, 0, 100},
    {"rope_attention_factor", &C::rope_attention_factor, false, 0, 100},
    {"rope_low_freq_factor", &C::rope_low_freq_factor, false, 1e-3, 1e6},
    {"rope_high_freq_factor", &C::rope_high_freq_factor, false, 1e-3, 1e6},
    {"max_context", &C::max_context, false, 0, 1e9},
    {"dense_ffn", &C::dense_ffn, false, 0, kMaxSize, 8},
    {"moe_ffn", &C::moe_ffn, false, 0, kMaxSize, 8},
    {"routed_experts", &C::routed_experts, false, 0, 4096},
    {"shared_experts", &C::shared_experts, false, 0, 64},
    {"top_k", &C::top_k, false, 0, 64},
    {"n_group", &C::n_group, false, 1, 4096},
    {"topk_group", &C::topk_group, false, 1, 4096},
    {"group_score", &C::group_score},
    {"score_function", &C::score_function},
    {"normalize_top_k", &C::normalize_top_k},
    {"route_scale", &C::route_scale, false, 1e-6, 1e6},
    {"router_bias", &C::router_bias},
    {"bias_update_rate", &C::bias_update_rate, false, 0, 1},
    {"bias_update_steps", &C::bias_update_steps, false, 0, 1e12},
    {"balance_loss", &C::balance_loss},
    {"balance_loss_alpha", &C::balance_loss_alpha, false, 0, 1e6},
    {"device_loss_alpha", &C::device_loss_alpha, false, 0, 1e6},
    {"communication_loss_alpha", &C::communication_loss_alpha, false, 0, 1e6},
    {"balance_devices", &C::balance_devices, false, 0, 4096},
    {"router_z_loss", &C::router_z_loss, false, 0, 1e6},
    {"capacity_factor", &C::capacity_factor, false, 0, 1e6},
    {"capacity_of", &C::capacity_of},
    {"capacity_spares", &C::capacity_spares, false, 0, 1},
    {"norm_eps", &C::norm_eps, false, 1e-12, 1},
    {"tied_embeddings", &C::tied_embeddings},
    {"init_std", &C::init_std, false, 1e-9, 10},
    {"head_init_std", &C::head_init_std, false, 0, 10},
};

} // namespace

std::span<const Field> all() {
    return kFields;
}

void refuse(std::string message) {
    for (char& c : message)
        if (static_cast<unsigned char>(c) < ' ')
            c = '?';
    throw Error(ErrorCode::InvalidArgument, std::move(message));
}

std::string number(double value) {
    std::ostringstream out;
    for (int digits = 6; digits <= std::numeric_limits<double>::max_digits10; ++digits) {
        out.str("");
        out.precision(digits);
        out << value;
        if (std::strtod(out.str().c_str(), nullptr) == value)
            break;
    }
    std::string text = out.str();
    if (text.find_first_of(".en") == std::string::npos)
        text += ".0";
    return text;
}

std::string number(std::uint64_t value) {
    return std::to_string(value);
}

namespace {

template <class Number>
void check_range(const Field& field, Number value, const Locate& where) {
    const auto as_double = static_cast<double>(value);
    if (!(as_double >= field.min && as_double <= field.max)) {
        const bool whole = std::is_integral_v<Number>;
        const auto bound = [&](double b) {
            return whole ? number(static_cast<std::uint64_t>(b)) : number(b);
        };
        refuse(where(field.name) + field.name + " = " + number(value) + " must lie between " +
               bound(field.min) + " and " + bound(field.max));
    }
}

void check_size(const Field& field, std::uint64_t value, const Locate& where) {
    check_range(field, value, where);
    if (value % field.multiple != 0) {
        const std::uint64_t down = value / field.multiple * field.multiple;
        refuse(where(field.name) + field.name + " = " + number(value) + " must be a multiple of " +
               number(field.multiple) + "; take " +
               (down >= static_cast<std::uint64_t>(std::max(field.min, 1.0)) ? number(down) + " or "
                                                                             : std::string()) +
               number(down + field.multiple));
    }
}

void check_attention(const ModelConfig& c, const Locate& where) {
    const auto needs = [&](const char* name, std::uint64_t value) {
        if (value == 0)
            refuse(where(name) + name + " is missing, which attention = \"" + name_of(c.attention) +
                   "\" needs");
    };
    const auto has_no = [&](const char* name, bool is_set) {
        if (is_set)
            refuse(where(name) + name + " is set, which attention = \"" + name_of(c.attention) +
                   "\" does not have");
    };
    if (c.is_mla()) {
        needs("kv_lora_rank", c.kv_lora_rank);
        needs("qk_nope_head_dim", c.qk_nope_head_dim);
        needs("qk_rope_head_dim", c.qk_rope_head_dim);
        needs("v_head_dim", c.v_head_dim);
        has_no("kv_heads", c.kv_heads != 0);
        has_no("head_dim", c.head_dim != 0);
        has_no("qk_norm", c.qk_norm);
        return;
    }
    needs("kv_heads", c.kv_heads);
    needs("head_dim", c.head_dim);
    has_no("q_lora_rank", c.q_lora_rank != 0);
    has_no("kv_lora_rank", c.kv_lora_rank != 0);
    has_no("qk_nope_head_dim", c.qk_nope_head_dim != 0);
    has_no("qk_rope_head_dim", c.qk_rope_head_dim != 0);
    has_no("v_head_dim", c.v_head_dim != 0);
    has_no("latent_norm_eps", c.latent_norm_eps != 0);
    if (c.heads % c.kv_heads != 0)
        refuse(where("kv_heads") + "kv_heads = " + number(c.kv_heads) +
               " does not divide heads = " + number(c.heads));
}

void check_rope(const ModelConfig& c, const Locate& where) {
    const auto refuse_field = [&](const char* name, const std::string& problem) {
        refuse(where(name) + name + problem + ", with rope_scaling = \"" + name_of(c.rope_scaling) +
               '"');
    };
    if (c.rope_scaling == RopeScaling::None) {
        if (c.rope_factor != 1)
            refuse_field("rope_factor", " = " + number(c.rope_factor) + " must be 1");
        return;
    }
    if (c.rope_original_context == 0)
        refuse_field("rope_original_context", " is missing");
    if (c.rope_scaling == RopeScaling::Yarn) {
        if (c.rope_beta_fast < c.rope_beta_slow)
            refuse_field("rope_beta_fast",
                         " = " + number(c.rope_beta_fast) +
                             " is below rope_beta_slow = " + number(c.rope_beta_slow));
        if (c.rope_theta <= 1)
            refuse_field("rope_theta", " = " + number(c.rope_theta) + " must exceed 1");
    } else if (c.rope_low_freq_factor >= c.rope_high_freq_factor) {
        refuse_field("rope_low_freq_factor", " = " + number(c.rope_low_freq_factor) +
                                                 " is not below rope_high_freq_factor = " +
                                                 number(c.rope_high_freq_factor));
    }
}

void check_experts(const ModelConfig& c, const Locate& where) {
    const auto positive = [&](const char* name, std::uint64_t value, const char* why) {
        if (value == 0)
            refuse(where(name) + name + " = 0 but " + why);
    };
    if (c.dense_layers > 0)
        positive("dense_ffn", c.dense_ffn, "dense_layers > 0: give the dense FFN's width");
    if (c.moe_layers() == 0)
        return;
    const char* why = "layers > dense_layers: the layers after the dense ones need experts";
    positive("routed_experts", c.routed_experts, why);
    positive("moe_ffn", c.moe_ffn, why);
    positive("top_k", c.top_k, why);
    if (c.routed_experts % c.n_group != 0)
        refuse(where("n_group") + "n_group = " + number(c.n_group) +
               " does not divide routed_experts = " + number(c.routed_experts));
    if (c.topk_group > c.n_group)
        refuse(where("topk_group") + "topk_group = " + number(c.topk_group) +
               " exceeds n_group = " + number(c.n_group));
    const std::uint64_t candidates = c.routed_experts / c.n_group * c.topk_group;
    if (c.top_k > candidates)
        refuse(where("top_k") + "top_k = " + number(c.top_k) + " exceeds the " +
               number(candidates) + " experts of the groups that a token may use (" +
               "routed_experts / n_group * topk_group)");
    if (!c.router_bias && c.bias_update_rate != 0)
        refuse(where("bias_update_rate") + "bias_update_rate = " + number(c.bias_update_rate) +
               " has nothing to update: set it to 0 or router_bias to true");
    if (c.has_device_losses() || (c.capacity_factor > 0 && c.capacity_of == CapacityOf::Device)) {
        const char* name = c.balance_devices > 0 ? "balance_devices" : "n_group";
        if (c.devices_used() < 2 || c.routed_experts % c.devices_used() != 0)
            refuse(where(name) + name + " = " + number(c.devices_used()) +
                   " must be 2 or more and divide routed_experts = " + number(c.routed_experts) +
                   ", for losses or the capacity of devices");
    }
}

} // namespace

void check(const ModelConfig& config, const Locate& where) {
    for (const Field& field : kFields) {
        if (const auto* size = std::get_if<std::uint64_t C::*>(&field.member))
            check_size(field, config.**size, where);
        else if (const auto* real = std::get_if<double C::*>(&field.member))
            check_range(field, config.**real, where);
    }
    if (config.dense_layers > config.layers)
        refuse(where("dense_layers") + "dense_layers = " + number(config.dense_layers) +
               " exceeds layers = " + number(config.layers));
    check_attention(config, where);
    check_rope(config, where);
    check_experts(config, where);
}

} // namespace config_fields

using config_fields::name_of;

const char* to_string(ScoreFunction function) noexcept {
    return name_of(function);
}
const char* to_string(GroupScore score) noexcept {
    return name_of(score);
}
const char* to_string(BalanceLossKind kind) noexcept {
    return name_of(kind);
}
const char* to_string(CapacityOf of) noexcept {
    return name_of(of);
}
const char* to_string(AttentionKind kind) noexcept {
    return name_of(kind);
}
const char* to_string(RopeScaling scaling) noexcept {
    return name_of(scaling);
}

GroupScore ModelConfig::group_score_used() const noexcept {
    if (group_score != GroupScore::Auto)
        return group_score;
    return score_function == ScoreFunction::Sigmoid ? GroupScore::TopTwo : GroupScore::Max;
}

std::uint64_t ModelConfig::devices_used() const noexcept {
    return balance_devices > 0 ? balance_devices : n_group;
}

std::uint64_t ModelConfig::devices_per_token() const noexcept {
    const std::uint64_t devices = devices_used();
    return std::min(top_k, devices == n_group ? topk_group : devices);
}

std::uint64_t ModelConfig::capacity(std::uint64_t tokens) const noexcept {
    const double mean =
        static_cast<double>(tokens * top_k) / static_cast<double>(capacity_groups());
    return static_cast<std::uint64_t>(
        std::min(std::ceil(capacity_factor * mean), static_cast<double>(tokens * top_k)));
}

bool ModelConfig::spares(std::uint64_t sequence) const noexcept {
    constexpr std::uint64_t kKey = 0x5A4E53A7D20B61C9; // other than what mixes the order of data
    return std::ldexp(static_cast<double>(mix(sequence ^ kKey) >> 11), -53) < capacity_spares;
}

double ModelConfig::attention_scale() const noexcept {
    const double amplitude = rope_scale_amplitude(*this);
    return amplitude * amplitude / std::sqrt(static_cast<double>(qk_head_dim()));
}

void validate(const ModelConfig& config) {
    config_fields::check(config, [](const char*) { return std::string("model: "); });
}

} // namespace bellows
