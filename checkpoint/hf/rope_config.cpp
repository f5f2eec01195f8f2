// SPDX-License-Identifier: MIT
#include "rope_config.hpp"

#include <bellows/base/error.hpp>

#include <cmath>
#include <optional>

namespace bellows {

namespace {

using Json = nlohmann::json;

double amplitude_of(double mscale, double factor) {
    return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

void read_yarn(ConfigKeys& keys, ModelConfig& model) {
    model.rope_scaling = RopeScaling::Yarn;
    model.rope_original_context =
        keys.count("original_max_position_embeddings").value_or(model.max_context);
    const auto original = static_cast<double>(model.rope_original_context);
    model.rope_factor =
        keys.real("factor").value_or(static_cast<double>(model.max_context) / original);
    // As in transformers, 0 stands for the usual value.
    const auto beta = [&](const char* key, double usual) {
        const double value = keys.real(key).value_or(0);
        return value == 0 ? usual : value;
    };
    model.rope_beta_fast = beta("beta_fast", 32);
    model.rope_beta_slow = beta("beta_slow", 1);
    model.rope_truncate = keys.flag("truncate").value_or(true);
    model.rope_mscale = keys.real("mscale").value_or(0);
    model.rope_mscale_all_dim = keys.real("mscale_all_dim").value_or(0);
    const std::optional<double> attention = keys.real("attention_factor");
    const bool both = model.rope_mscale > 0 && model.rope_mscale_all_dim > 0;
    const double ratio = amplitude_of(model.rope_mscale, model.rope_factor) /
                         amplitude_of(model.rope_mscale_all_dim, model.rope_factor);
    if (attention && *attention <= 0)
        keys.refuse("attention_factor", "must be above 0");
    if (!model.is_mla()) { // only DeepSeek's softmax scale knows of mscale_all_dim
        model.rope_attention_factor = attention.value_or(both ? ratio : 0);
        model.rope_mscale = model.rope_mscale_all_dim = 0;
        return;
    }
    if (attention && both && std::abs(*attention - ratio) > 1e-6 * ratio)
        keys.refuse("attention_factor",
                    "contradicts mscale and mscale_all_dim, which give " + std::to_string(ratio));
    if (attention && !both)
        model.rope_attention_factor = *attention;
}

void read_llama3(ConfigKeys& keys, ModelConfig& model) {
    model.rope_scaling = RopeScaling::Llama3;
    const auto needed = [&](const char* key) {
        const std::optional<double> value = keys.real(key);
        if (!value)
            keys.refuse(key, "is missing, which rope_type \"llama3\" needs");
        return *value;
    };
    model.rope_factor = needed("factor");
    model.rope_low_freq_factor = needed("low_freq_factor");
    model.rope_high_freq_factor = needed("high_freq_factor");
    model.rope_original_context =
        keys.count("original_max_position_embeddings").value_or(model.max_context);
}

void read_scaling(ConfigKeys& keys, ModelConfig& model) {
    const std::optional<std::string> old = keys.text("type"), now = keys.text("rope_type");
    if (old && now && *old != *now)
        keys.refuse("rope_type", "contradicts type = " + in_quotes(*old));
    const std::string type = now ? *now : old.value_or("default");
    if (const auto theta = keys.real("rope_theta"))
        model.rope_theta = *theta;
    keys.require("partial_rotary_factor", 1.0, "heads are rotated as a whole");
    if (type == "yarn")
        read_yarn(keys, model);
    else if (type == "llama3")
        read_llama3(keys, model);
    else if (type != "default")
        keys.refuse(now ? "rope_type" : "type",
                    "is not supported; there are: default, yarn, llama3");
    const std::vector<std::string> rest = keys.rest();
    if (!rest.empty())
        keys.refuse(rest.front(), "is a key that rope_type " + in_quotes(type) +
                                      " does not have, and may change what the model computes");
}

} // namespace

void read_rope(ConfigKeys& keys, ModelConfig& model) {
    if (const auto theta = keys.real("rope_theta"))
        model.rope_theta = *theta;
    const Json* const old = keys.object("rope_scaling");
    const Json* const now = keys.object("rope_parameters");
    if (old != nullptr && now != nullptr && *old != *now)
        keys.refuse("rope_scaling", "stands beside rope_parameters, which says otherwise; "
                                    "leave one of them out");
    if (old == nullptr && now == nullptr)
        return;
    ConfigKeys scaling(now != nullptr ? *now : *old, keys.source(),
                       now != nullptr ? "rope_parameters." : "rope_scaling.");
    read_scaling(scaling, model);
}

nlohmann::ordered_json format_rope_scaling(const ModelConfig& model) {
    nlohmann::ordered_json json;
    if (model.rope_scaling == RopeScaling::None)
        return json;
    const char* const type = to_string(model.rope_scaling);
    json = {{"rope_type", type},
            {"type", type},
            {"factor", model.rope_factor},
            {"original_max_position_embeddings", model.rope_original_context}};
    if (model.rope_scaling == RopeScaling::Llama3) {
        json.erase("type"); // younger than that spelling
        json["low_freq_factor"] = model.rope_low_freq_factor;
        json["high_freq_factor"] = model.rope_high_freq_factor;
        return json;
    }
    json["beta_fast"] = model.rope_beta_fast;
    json["beta_slow"] = model.rope_beta_slow;
    if (!model.rope_truncate)
        json["truncate"] = false;
    if (model.rope_mscale > 0)
        json["mscale"] = model.rope_mscale;
    if (model.rope_mscale_all_dim > 0)
        json["mscale_all_dim"] = model.rope_mscale_all_dim;
    if (model.rope_attention_factor > 0)
        json["attention_factor"] = model.rope_attention_factor;
    return json;
}

} // namespace bellows
