// SPDX-License-Identifier: MIT
// ModelConfig → config.json.
#include "rope_config.hpp"

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/hf_config.hpp>

namespace bellows {

namespace {

using Json = nlohmann::ordered_json;

[[noreturn]] void refuse(const std::string& what) {
    throw Error(ErrorCode::InvalidArgument,
                "no architecture of Hugging Face that Bellows writes has " + what);
}

HfModelType mla_type(const ModelConfig& c) {
    if (c.latent_eps() != 1e-6)
        refuse("norms of latents with an eps of " + std::to_string(c.latent_eps()) +
               ": it is always 1e-6 (latent_norm_eps in [model])");
    if (c.moe_layers() == 0)
        return HfModelType::DeepseekV3;
    const bool grouped = c.n_group > 1;
    if (c.score_function == ScoreFunction::Softmax) {
        if (c.router_bias)
            refuse("softmax scores and a router bias");
        if (c.normalize_top_k)
            refuse("latent attention, softmax scores and normalize_top_k");
        if (grouped && c.group_score_used() != GroupScore::Max)
            refuse("softmax scores and group_score = \"top_two\"");
        return HfModelType::DeepseekV2;
    }
    if (!c.router_bias)
        refuse("sigmoid scores without a router bias");
    if (grouped && c.group_score_used() != GroupScore::TopTwo)
        refuse("sigmoid scores and group_score = \"max\"");
    if (c.routed_experts / c.n_group < 2)
        refuse("sigmoid scores and groups of one expert");
    return HfModelType::DeepseekV3;
}

HfModelType gqa_type(const ModelConfig& c) {
    if (c.rope_mscale > 0 || c.rope_mscale_all_dim > 0)
        refuse("grouped-query attention and rope_mscale; rope_attention_factor says the same");
    if (c.moe_layers() == 0)
        return c.qk_norm ? HfModelType::Qwen3 : HfModelType::Llama;
    if (!c.qk_norm)
        refuse("grouped-query attention without qk_norm and experts");
    if (c.score_function != ScoreFunction::Softmax || c.router_bias)
        refuse("grouped-query attention and experts chosen by sigmoid scores or with a bias");
    if (c.n_group > 1 && c.topk_group < c.n_group)
        refuse("grouped-query attention and groups of experts");
    if (c.shared_experts > 0)
        refuse("grouped-query attention and shared experts");
    if (c.route_scale != 1)
        refuse("grouped-query attention and a route_scale other than 1");
    return HfModelType::Qwen3Moe;
}

const char* class_of(HfModelType type) {
    switch (type) {
    case HfModelType::DeepseekV2:
        return "DeepseekV2ForCausalLM";
    case HfModelType::DeepseekV3:
        return "DeepseekV3ForCausalLM";
    case HfModelType::Llama:
        return "LlamaForCausalLM";
    case HfModelType::Qwen3:
        return "Qwen3ForCausalLM";
    case HfModelType::Qwen3Moe:
        return "Qwen3MoeForCausalLM";
    }
    throw Error(ErrorCode::Internal, "no such model type");
}

void add_mla(Json& json, const ModelConfig& c) {
    json["num_key_value_heads"] = c.heads;
    json["q_lora_rank"] = c.q_lora_rank > 0 ? Json(c.q_lora_rank) : Json();
    json["kv_lora_rank"] = c.kv_lora_rank;
    json["qk_nope_head_dim"] = c.qk_nope_head_dim;
    json["qk_rope_head_dim"] = c.qk_rope_head_dim;
    json["v_head_dim"] = c.v_head_dim;
}

void add_deepseek_experts(Json& json, const ModelConfig& c, HfModelType type) {
    const bool v3 = type == HfModelType::DeepseekV3;
    json["first_k_dense_replace"] = c.dense_layers;
    json["moe_layer_freq"] = 1;
    json["num_nextn_predict_layers"] = c.mtp_depth;
    if (c.moe_layers() == 0)
        return;
    json["moe_intermediate_size"] = c.moe_ffn;
    json["n_routed_experts"] = c.routed_experts;
    json["n_shared_experts"] = c.shared_experts > 0 ? Json(c.shared_experts) : Json();
    json["num_experts_per_tok"] = c.top_k;
    json["n_group"] = c.n_group;
    json["topk_group"] = c.topk_group;
    json["topk_method"] = v3 ? "noaux_tc" : c.n_group == 1 ? "greedy" : "group_limited_greedy";
    json["scoring_func"] = to_string(c.score_function);
    json["norm_topk_prob"] = c.normalize_top_k;
    json["routed_scaling_factor"] = c.route_scale;
    // As far as the format has it: whatever is left out matters to training alone.
    if (c.balance_loss_alpha > 0 && c.balance_loss != BalanceLossKind::Global) {
        json["aux_loss_alpha"] = c.balance_loss_alpha;
        json["seq_aux"] = c.balances_sequences();
    }
}

void add_qwen_experts(Json& json, const ModelConfig& c) {
    json["decoder_sparse_step"] = 1;
    Json dense = Json::array();
    for (std::uint64_t layer = 0; layer < c.dense_layers; ++layer)
        dense.push_back(layer);
    json["mlp_only_layers"] = dense;
    json["moe_intermediate_size"] = c.moe_ffn;
    json["num_experts"] = c.routed_experts;
    json["num_experts_per_tok"] = c.top_k;
    json["norm_topk_prob"] = c.normalize_top_k;
}

void add_tokens(Json& json, const HfOutput& output) {
    json["bos_token_id"] = output.bos ? Json(*output.bos) : Json();
    json["eos_token_id"] = output.eos.empty()       ? Json()
                           : output.eos.size() == 1 ? Json(output.eos.front())
                                                    : Json(output.eos);
}

} // namespace

HfModelType hf_model_type(const ModelConfig& model) {
    const HfModelType type = model.is_mla() ? mla_type(model) : gqa_type(model);
    if (model.mtp_depth > 0 && type != HfModelType::DeepseekV3)
        refuse("MTP modules, apart from deepseek_v3, and this is " + std::string(to_string(type)) +
               " (mtp_depth in [model])");
    return type;
}

std::string format_hf_config(const ModelConfig& c, const HfOutput& output) {
    const HfModelType type = hf_model_type(c);
    Json json = {{"architectures", {class_of(type)}},
                 {"model_type", to_string(type)},
                 {"torch_dtype", output.dtype},
                 {"vocab_size", c.vocabulary},
                 {"hidden_size", c.hidden},
                 {"intermediate_size", c.dense_ffn > 0 ? c.dense_ffn : c.moe_ffn},
                 {"num_hidden_layers", c.layers},
                 {"num_attention_heads", c.heads}};
    if (c.is_mla()) {
        add_mla(json, c);
        add_deepseek_experts(json, c, type);
    } else {
        json["num_key_value_heads"] = c.kv_heads;
        json["head_dim"] = c.head_dim;
        if (type == HfModelType::Qwen3Moe)
            add_qwen_experts(json, c);
    }
    json["hidden_act"] = "silu";
    json["attention_bias"] = false;
    json["attention_dropout"] = 0.0;
    json["max_position_embeddings"] = c.max_context > 0 ? c.max_context : output.max_context;
    json["rope_theta"] = c.rope_theta;
    json["rope_scaling"] = format_rope_scaling(c);
    json["rms_norm_eps"] = c.norm_eps;
    json["tie_word_embeddings"] = c.tied_embeddings;
    json["initializer_range"] = c.init_std;
    json["use_cache"] = true;
    add_tokens(json, output);
    if (output.fp8)
        json["quantization_config"] = {{"quant_method", "fp8"},
                                       {"fmt", "e4m3"},
                                       {"activation_scheme", "dynamic"},
                                       {"weight_block_size", {128, 128}}};
    return json.dump(2) + "\n";
}

std::string format_hf_generation_config(const HfOutput& output) {
    Json json = {{"_from_model_config", true}};
    add_tokens(json, output);
    return json.dump(2) + "\n";
}

} // namespace bellows
