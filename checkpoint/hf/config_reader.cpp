// SPDX-License-Identifier: MIT
// config.json → ModelConfig.
#include "base/strict_json.hpp"
#include "config_keys.hpp"
#include "rope_config.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/checkpoint/hf_config.hpp>

#include <algorithm>
#include <array>
#include <string_view>

namespace bellows {

namespace {

using Json = nlohmann::json;
constexpr std::uint64_t kLargestConfig = std::uint64_t{1} << 20;

/// Keys that change nothing of what is computed here: how the file came about, what generation or
/// training elsewhere does.
constexpr std::array kHarmless = {"_attn_implementation",
                                  "_commit_hash",
                                  "_name_or_path",
                                  "architectures",
                                  "auto_map",
                                  "bad_words_ids",
                                  "begin_suppress_tokens",
                                  "chunk_size_feed_forward",
                                  "cross_attention_hidden_size",
                                  "decoder_start_token_id",
                                  "diversity_penalty",
                                  "do_sample",
                                  "early_stopping",
                                  "encoder_no_repeat_ngram_size",
                                  "ep_size",
                                  "exponential_decay_length_penalty",
                                  "finetuning_task",
                                  "forced_bos_token_id",
                                  "forced_eos_token_id",
                                  "id2label",
                                  "is_decoder",
                                  "is_encoder_decoder",
                                  "label2id",
                                  "length_penalty",
                                  "max_length",
                                  "min_length",
                                  "no_repeat_ngram_size",
                                  "num_beam_groups",
                                  "num_beams",
                                  "num_return_sequences",
                                  "output_attentions",
                                  "output_hidden_states",
                                  "output_router_logits",
                                  "output_scores",
                                  "pad_token_id",
                                  "prefix",
                                  "pretraining_tp",
                                  "problem_type",
                                  "remove_invalid_values",
                                  "repetition_penalty",
                                  "return_dict",
                                  "return_dict_in_generate",
                                  "router_aux_loss_coef",
                                  "sep_token_id",
                                  "suppress_tokens",
                                  "task_specific_params",
                                  "temperature",
                                  "tf_legacy_loss",
                                  "tie_encoder_decoder",
                                  "tokenizer_class",
                                  "top_k",
                                  "top_p",
                                  "torchscript",
                                  "transformers_version",
                                  "typical_p",
                                  "unsloth_fixed",
                                  "unsloth_version",
                                  "use_bfloat16",
                                  "use_cache"};

/// What a class of transformers takes for a key that is absent.
struct Defaults {
    std::uint64_t vocabulary, hidden, ffn, layers, heads, kv_heads, context;
    std::uint64_t moe_ffn = 0, experts = 0, shared = 0, top_k = 0, dense_layers = 0;
    std::uint64_t groups = 1, topk_groups = 1;
    double route_scale = 1;
    bool normalises = false;
};

Defaults defaults_of(HfModelType type) {
    switch (type) {
    case HfModelType::DeepseekV2:
        return {102400, 4096, 11008, 32, 32, 0, 2048, 1407, 64, 2};
    case HfModelType::DeepseekV3:
        return {129280, 7168, 18432, 61, 128, 0, 4096, 2048, 256, 1, 8, 3, 8, 4, 2.5, true};
    case HfModelType::Llama:
        return {32000, 4096, 11008, 32, 32, 0, 2048};
    case HfModelType::Qwen3:
        return {151936, 4096, 22016, 32, 32, 32, 32768};
    case HfModelType::Qwen3Moe:
        return {151936, 2048, 6144, 24, 32, 4, 32768, 768, 128, 0, 8};
    }
    throw Error(ErrorCode::Internal, "no such model type");
}

HfModelType read_type(ConfigKeys& keys) {
    const std::optional<std::string> name = keys.text("model_type");
    if (!name)
        keys.refuse("model_type", "is missing; there are: deepseek_v2, deepseek_v3, llama, qwen3, "
                                  "qwen3_moe");
    if (*name == "kimi_k2")
        return HfModelType::DeepseekV3;
    for (const auto type : {HfModelType::DeepseekV2, HfModelType::DeepseekV3, HfModelType::Llama,
                            HfModelType::Qwen3, HfModelType::Qwen3Moe})
        if (*name == to_string(type))
            return type;
    keys.refuse("model_type", "is not supported; there are: deepseek_v2, deepseek_v3, llama, "
                              "qwen3, qwen3_moe");
}

void read_mla(ConfigKeys& keys, ModelConfig& model) {
    model.attention = AttentionKind::Mla;
    model.q_lora_rank = keys.stands("q_lora_rank") ? keys.count("q_lora_rank").value_or(0) : 1536;
    model.kv_lora_rank = keys.count("kv_lora_rank").value_or(512);
    model.qk_nope_head_dim = keys.count("qk_nope_head_dim").value_or(128);
    model.qk_rope_head_dim = keys.count("qk_rope_head_dim").value_or(64);
    model.v_head_dim = keys.count("v_head_dim").value_or(128);
    if (const auto kv = keys.count("num_key_value_heads"); kv && *kv != model.heads)
        keys.refuse("num_key_value_heads",
                    "must equal num_attention_heads = " + std::to_string(model.heads) +
                        ": every head has its own keys and values");
    if (const auto dim = keys.count("head_dim"); dim && *dim != model.qk_rope_head_dim)
        keys.refuse("head_dim",
                    "must equal qk_rope_head_dim = " + std::to_string(model.qk_rope_head_dim));
    if (const auto dim = keys.count("qk_head_dim"); dim && *dim != model.qk_head_dim())
        keys.refuse("qk_head_dim", "must be qk_nope_head_dim + qk_rope_head_dim");
    keys.require("rope_interleave", true, "pairs of elements that stand side by side are rotated");
    // The classes of transformers build these norms with their default.
    constexpr double kLatentEps = 1e-6;
    model.latent_norm_eps = model.norm_eps == kLatentEps ? 0 : kLatentEps;
}

void read_gqa(ConfigKeys& keys, HfModelType type, const Defaults& usual, ModelConfig& model) {
    model.attention = AttentionKind::Gqa;
    model.qk_norm = type != HfModelType::Llama;
    model.kv_heads = keys.count("num_key_value_heads")
                         .value_or(usual.kv_heads > 0 ? usual.kv_heads : model.heads);
    const std::optional<std::uint64_t> dim = keys.count("head_dim");
    if (!dim && type != HfModelType::Qwen3 && (model.heads == 0 || model.hidden % model.heads != 0))
        keys.refuse("num_attention_heads", "does not divide hidden_size, and there is no head_dim");
    model.head_dim = dim ? *dim : type == HfModelType::Qwen3 ? 128 : model.hidden / model.heads;
    if (keys.flag("use_sliding_window").value_or(false))
        keys.refuse("use_sliding_window", "is not supported: attention sees the whole text");
    (void)keys.count("max_window_layers");
    if (type == HfModelType::Llama)
        keys.require("sliding_window", nullptr, "attention sees the whole text");
    else
        (void)keys.has("sliding_window"); // not in use
    for (const std::string& kind : keys.texts("layer_types"))
        if (kind != "full_attention")
            keys.refuse("layer_types", "is not supported: all layers have full attention");
}

void read_expert_counts(ConfigKeys& keys, const Defaults& usual, ModelConfig& model) {
    std::optional<std::uint64_t> experts;
    for (const char* key : {"n_routed_experts", "num_experts", "num_local_experts"}) {
        const std::optional<std::uint64_t> here = keys.count(key);
        if (here && experts && *here != *experts)
            keys.refuse(key, "contradicts another key, which says " + std::to_string(*experts));
        if (here)
            experts = here;
    }
    model.routed_experts = experts.value_or(usual.experts);
    model.moe_ffn = keys.count("moe_intermediate_size").value_or(usual.moe_ffn);
    const std::optional<std::uint64_t> top_k = keys.count("num_experts_per_tok");
    if (!top_k && usual.top_k == 0)
        keys.refuse("num_experts_per_tok", "is missing");
    model.top_k = top_k.value_or(usual.top_k);
}

void read_deepseek_experts(ConfigKeys& keys, HfModelType type, const Defaults& usual,
                           ModelConfig& model) {
    const bool v3 = type == HfModelType::DeepseekV3;
    read_expert_counts(keys, usual, model);
    model.shared_experts =
        keys.stands("n_shared_experts") ? keys.count("n_shared_experts").value_or(0) : usual.shared;
    const std::string method = keys.text("topk_method").value_or(v3 ? "noaux_tc" : "greedy");
    const bool grouped = method == "noaux_tc" || method == "group_limited_greedy";
    if (v3 ? method != "noaux_tc" : method == "noaux_tc" || (!grouped && method != "greedy"))
        keys.refuse("topk_method",
                    std::string("is not supported for ") + to_string(type) +
                        (v3 ? "; it has noaux_tc" : "; it has greedy and group_limited_greedy"));
    const auto groups = [&](const char* key, std::uint64_t otherwise) {
        return keys.stands(key) ? keys.count(key).value_or(1) : otherwise;
    };
    model.n_group = groups("n_group", usual.groups);
    model.topk_group = groups("topk_group", usual.topk_groups);
    if (!grouped)
        model.n_group = model.topk_group = 1;
    keys.require("scoring_func", v3 ? "sigmoid" : "softmax",
                 std::string(to_string(type)) + " has " + (v3 ? "sigmoid" : "softmax") + " scores");
    model.score_function = v3 ? ScoreFunction::Sigmoid : ScoreFunction::Softmax;
    model.router_bias = v3;
    model.normalize_top_k = keys.flag("norm_topk_prob").value_or(usual.normalises);
    if (!v3 && model.normalize_top_k)
        keys.refuse("norm_topk_prob", "is not supported for deepseek_v2: programs that read such "
                                      "models disagree on what it does");
    model.route_scale = keys.real("routed_scaling_factor").value_or(usual.route_scale);
    const double alpha = keys.real("aux_loss_alpha").value_or(0);
    // Without seq_aux these programs count the choices of whole micro-batches.
    const bool by_sequence = keys.flag("seq_aux").value_or(true);
    model.balance_loss_alpha = by_sequence || !model.limits_choices() ? alpha : 0;
    if (model.balance_loss_alpha > 0)
        model.balance_loss = !by_sequence ? BalanceLossKind::MicroBatch
                             : v3         ? BalanceLossKind::Sequence
                                          : BalanceLossKind::Expert;
    keys.require("moe_layer_freq", 1, "all layers from first_k_dense_replace on have experts");
}

void read_qwen_experts(ConfigKeys& keys, const Defaults& usual, ModelConfig& model) {
    read_expert_counts(keys, usual, model);
    model.score_function = ScoreFunction::Softmax;
    model.router_bias = false;
    model.normalize_top_k = keys.flag("norm_topk_prob").value_or(usual.normalises);
}

/// The first so many; others in between have no place in a ModelConfig.
std::uint64_t qwen_dense_layers(ConfigKeys& keys, const ModelConfig& model) {
    keys.require("decoder_sparse_step", 1, "all layers behind the dense ones have experts");
    std::vector<std::uint64_t> dense = keys.counts("mlp_only_layers");
    std::ranges::sort(dense);
    for (std::size_t i = 0; i < dense.size(); ++i)
        if (dense[i] != i)
            keys.refuse("mlp_only_layers", "is not supported: dense layers are the first ones");
    return std::min<std::uint64_t>(dense.size(), model.layers);
}

void read_layers(ConfigKeys& keys, HfModelType type, const Defaults& usual, ModelConfig& model) {
    const bool deepseek = type == HfModelType::DeepseekV2 || type == HfModelType::DeepseekV3;
    const std::uint64_t ffn = keys.count("intermediate_size").value_or(usual.ffn);
    ModelConfig experts = model; // left out where no layer has some
    if (deepseek) {
        const std::uint64_t dense =
            keys.count("first_k_dense_replace").value_or(usual.dense_layers);
        experts.dense_layers = std::min(dense, model.layers);
        read_deepseek_experts(keys, type, usual, experts);
    } else if (type == HfModelType::Qwen3Moe) {
        experts.dense_layers = qwen_dense_layers(keys, model);
        read_qwen_experts(keys, usual, experts);
    } else {
        experts.dense_layers = model.layers;
    }
    if (experts.moe_layers() > 0)
        model = experts;
    model.dense_layers = experts.dense_layers;
    model.dense_ffn = model.dense_layers > 0 ? ffn : 0;
    if (model.moe_layers() == 0 || !model.router_bias) {
        model.router_bias = false;
        model.bias_update_rate = 0;
    }
}

bool read_quantization(ConfigKeys& keys) {
    const Json* const object = keys.object("quantization_config");
    if (object == nullptr)
        return false;
    ConfigKeys inner(*object, keys.source(), "quantization_config.");
    const std::string why = "weights may be FP8 (e4m3) in blocks of 128 x 128, or not quantised";
    if (!inner.has("quant_method"))
        inner.refuse("quant_method", "is missing");
    inner.require("quant_method", "fp8", why);
    inner.require("fmt", "e4m3", why);
    inner.require("activation_scheme", "dynamic", why);
    if (!inner.has("weight_block_size"))
        inner.refuse("weight_block_size", "is missing: " + why);
    inner.require("weight_block_size", Json::array({128, 128}), why);
    for (const char* key : {"modules_to_not_convert", "scale_fmt", "dequantize"})
        (void)inner.has(key);
    const std::vector<std::string> rest = inner.rest();
    if (!rest.empty())
        inner.refuse(rest.front(), "is not known, and may change what the weights mean");
    return true;
}

/// What is there and was not read: harmless, or refused.
std::vector<std::string> ignored_keys(const ConfigKeys& keys) {
    std::vector<std::string> ignored;
    for (const std::string& key : keys.rest()) {
        if (std::ranges::find(kHarmless, key) == kHarmless.end())
            keys.refuse(in_quotes(key), "is a key that Bellows does not know and that may change "
                                        "what the model computes; remove it if it does not");
        ignored.push_back(key);
    }
    return ignored;
}

} // namespace

const char* to_string(HfModelType type) noexcept {
    switch (type) {
    case HfModelType::DeepseekV2:
        return "deepseek_v2";
    case HfModelType::DeepseekV3:
        return "deepseek_v3";
    case HfModelType::Llama:
        return "llama";
    case HfModelType::Qwen3:
        return "qwen3";
    case HfModelType::Qwen3Moe:
        return "qwen3_moe";
    }
    return "unknown";
}

HfConfig parse_hf_config(std::string_view text, std::string_view source) {
    const std::string file(source);
    const Json json = parse_strict_object(text, file);
    ConfigKeys keys(json, file);
    HfConfig config;
    config.type = read_type(keys);
    const Defaults usual = defaults_of(config.type);
    ModelConfig& model = config.model;
    model.vocabulary = keys.count("vocab_size").value_or(usual.vocabulary);
    model.hidden = keys.count("hidden_size").value_or(usual.hidden);
    model.layers = keys.count("num_hidden_layers").value_or(usual.layers);
    model.heads = keys.count("num_attention_heads").value_or(usual.heads);
    model.max_context = keys.count("max_position_embeddings").value_or(usual.context);
    model.norm_eps = keys.real("rms_norm_eps").value_or(1e-6);
    model.tied_embeddings = keys.flag("tie_word_embeddings").value_or(false);
    model.init_std = keys.real("initializer_range").value_or(0.02);
    keys.require("hidden_act", "silu", "FFNs have SwiGLU");
    for (const char* key : {"attention_bias", "mlp_bias", "qkv_bias"})
        keys.require(key, false, "linear layers have no bias");
    keys.require("attention_dropout", 0.0, "nothing is dropped");
    if (config.type == HfModelType::DeepseekV2 || config.type == HfModelType::DeepseekV3)
        read_mla(keys, model);
    else
        read_gqa(keys, config.type, usual, model);
    read_rope(keys, model);
    read_layers(keys, config.type, usual, model);
    for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers"})
        config.mtp_modules = std::max(config.mtp_modules, keys.count(key).value_or(0));
    constexpr std::uint64_t kMostModules = 16;
    if (config.mtp_modules > kMostModules)
        throw Error(ErrorCode::InvalidArgument,
                    file + ": " + std::to_string(config.mtp_modules) +
                        " layers that predict further tokens are not supported, " +
                        std::to_string(kMostModules) + " are");
    for (const char* key : {"dtype", "torch_dtype"})
        if (const auto name = keys.text(key))
            config.dtype = *name;
    config.fp8 = read_quantization(keys);
    if (const std::vector<std::uint64_t> bos = keys.counts("bos_token_id"); !bos.empty())
        config.bos = bos.front();
    config.eos = keys.counts("eos_token_id");
    config.ignored = ignored_keys(keys);
    config.read.assign(keys.taken().begin(), keys.taken().end());
    constexpr std::uint64_t kMostExperts = 262144; // of all layers
    if (model.layers > kMostExperts || model.routed_experts > kMostExperts ||
        model.moe_layers() * model.routed_experts > kMostExperts)
        throw Error(ErrorCode::InvalidArgument, file + ": the layers have more than " +
                                                    std::to_string(kMostExperts) +
                                                    " experts together, which is not supported");
    try {
        validate(model);
    } catch (const Error& error) {
        throw Error(error.code(), file + ": " + error.message());
    }
    return config;
}

HfConfig load_hf_config(const std::filesystem::path& folder) {
    const std::filesystem::path file = folder / kHfConfigFile;
    return parse_hf_config(read_file(file, kLargestConfig), file.string());
}

std::vector<std::uint64_t> end_tokens(const std::filesystem::path& folder, const HfConfig& config) {
    std::vector<std::uint64_t> ends = config.eos;
    const std::filesystem::path file = folder / kHfGenerationFile;
    std::error_code none;
    if (std::filesystem::exists(file, none)) {
        const Json json = parse_strict_object(read_file(file, kLargestConfig), file.string());
        ConfigKeys keys(json, file.string());
        for (const std::uint64_t id : keys.counts("eos_token_id"))
            ends.push_back(id);
    }
    std::ranges::sort(ends);
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    return ends;
}

} // namespace bellows
