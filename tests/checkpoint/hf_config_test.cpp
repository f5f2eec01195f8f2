// SPDX-License-Identifier: MIT
// config.json of others: what is read, what is refused, and what is written.
#include "checkpoint/hf_models.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/base/files.hpp>
#include <bellows/checkpoint/hf_config.hpp>
#include <bellows/shape/presets.hpp>

#include <nlohmann/json.hpp>

using namespace bellows;
using Json = nlohmann::json;
using bellows::testing::hf_model;

namespace {

Json config_of(const std::string& name) {
    return Json::parse(read_file(hf_model(name) / "config.json", 1 << 20));
}

HfConfig parse(const Json& json) {
    return parse_hf_config(json.dump(), "config.json");
}

/// The model of a folder whose config.json is changed so; null removes a key.
HfConfig changed(const std::string& name, const Json& patch) {
    Json json = config_of(name);
    json.merge_patch(patch);
    return parse(json);
}

ModelConfig without_training(ModelConfig model) {
    model.bias_update_rate = model.head_init_std = 0;
    return model;
}

} // namespace

TEST(HfConfig, ReadsDeepSeekV3) {
    const HfConfig config = load_hf_config(hf_model("v3"));
    EXPECT_EQ(config.type, HfModelType::DeepseekV3);
    EXPECT_EQ(config.dtype, "bfloat16");
    EXPECT_EQ(config.mtp_modules, 1u);
    EXPECT_EQ(config.bos, 0u);
    EXPECT_EQ(config.eos, std::vector<std::uint64_t>{1});
    const ModelConfig& model = config.model;
    EXPECT_TRUE(model.is_mla());
    EXPECT_EQ(model.q_lora_rank, 24u);
    EXPECT_EQ(model.n_group, 4u);
    EXPECT_EQ(model.topk_group, 2u);
    EXPECT_EQ(model.group_score_used(), GroupScore::TopTwo);
    EXPECT_TRUE(model.router_bias);
    EXPECT_EQ(model.rope_scaling, RopeScaling::Yarn);
    EXPECT_EQ(model.rope_factor, 4);
    EXPECT_EQ(model.rope_original_context, 64u);
    EXPECT_EQ(model.rope_mscale_all_dim, 1);
    EXPECT_EQ(model.max_context, 256u);
    EXPECT_EQ(model.latent_eps(), 1e-6);
}

TEST(HfConfig, ReadsTheOthers) {
    const ModelConfig lite = load_hf_config(hf_model("v2-lite")).model;
    EXPECT_EQ(lite.q_lora_rank, 0u);
    EXPECT_EQ(lite.n_group, 1u);
    EXPECT_FALSE(lite.router_bias);
    EXPECT_FALSE(lite.normalize_top_k);
    EXPECT_EQ(lite.shared_experts, 2u);
    EXPECT_EQ(load_hf_config(hf_model("v2")).model.group_score_used(), GroupScore::Max);
    const ModelConfig moonlight = load_hf_config(hf_model("moonlight")).model;
    EXPECT_EQ(moonlight.norm_eps, 1e-2);
    EXPECT_EQ(moonlight.latent_eps(), 1e-6);
    EXPECT_EQ(moonlight.route_scale, 2.446);
    EXPECT_TRUE(load_hf_config(hf_model("v3-fp8")).fp8);
    const ModelConfig llama = load_hf_config(hf_model("llama3-tied")).model;
    EXPECT_FALSE(llama.is_mla());
    EXPECT_FALSE(llama.qk_norm);
    EXPECT_TRUE(llama.tied_embeddings);
    EXPECT_EQ(llama.moe_layers(), 0u);
    EXPECT_EQ(llama.rope_scaling, RopeScaling::Llama3);
    EXPECT_EQ(llama.rope_theta, 500000);
    const ModelConfig qwen = load_hf_config(hf_model("qwen3-moe")).model;
    EXPECT_TRUE(qwen.qk_norm);
    EXPECT_EQ(qwen.dense_layers, 1u);
    EXPECT_EQ(qwen.head_dim, 16u);
    EXPECT_TRUE(qwen.normalize_top_k);
}

TEST(HfConfig, WritesWhatItReads) {
    for (const std::string& name : bellows::testing::hf_models()) {
        SCOPED_TRACE(name);
        const HfConfig read = load_hf_config(hf_model(name));
        HfOutput output;
        output.fp8 = read.fp8;
        output.bos = read.bos;
        output.eos = read.eos;
        const HfConfig again = parse_hf_config(format_hf_config(read.model, output), "config.json");
        EXPECT_EQ(to_toml(again.model), to_toml(read.model));
        EXPECT_EQ(again.type, read.type);
        EXPECT_EQ(again.fp8, read.fp8);
        EXPECT_EQ(again.bos, read.bos);
        EXPECT_EQ(again.eos, read.eos);
        EXPECT_TRUE(again.ignored.size() <= 3) << again.ignored.size();
    }
    HfOutput output;
    output.max_context = 4096;
    for (const char* name : {"tiny", "v2-lite", "v3-671b"}) {
        SCOPED_TRACE(name);
        const ModelConfig model = load_model(name);
        ModelConfig again = parse_hf_config(format_hf_config(model, output), "config.json").model;
        if (model.max_context == 0)
            again.max_context = 0;
        EXPECT_EQ(to_toml(without_training(again)), to_toml(without_training(model)));
    }
}

TEST(HfConfig, TakesBothSpellings) {
    // Whole and fractional numbers, null, and what classes of transformers take by default.
    const ModelConfig v3 = load_hf_config(hf_model("v3")).model;
    EXPECT_EQ(changed("v3", {{"rope_scaling", {{"factor", 4.0}}}, {"n_group", 4.0}}).model, v3);
    EXPECT_EQ(changed("v3", {{"model_type", "kimi_k2"}}).model, v3);
    Json json = config_of("v3");
    json["rope_parameters"] = json["rope_scaling"];
    json["rope_parameters"]["rope_theta"] = 10000;
    json["rope_parameters"]["rope_type"] = "yarn";
    json.erase("rope_scaling");
    json.erase("rope_theta");
    EXPECT_EQ(parse(json).model, v3);
    EXPECT_EQ(changed("v3", {{"q_lora_rank", nullptr}}).model.q_lora_rank, 1536u);
    json["q_lora_rank"] = nullptr;
    EXPECT_EQ(parse(json).model.q_lora_rank, 0u);
    EXPECT_EQ(changed("llama", {{"head_dim", nullptr}}).model.head_dim, 8u);
    EXPECT_EQ(changed("v3", {{"eos_token_id", {1, 5}}}).eos, (std::vector<std::uint64_t>{1, 5}));
    EXPECT_EQ(changed("v3", {{"auto_map", {{"AutoModel", "x"}}}}).ignored.front(), "architectures");
    // Without mscale_all_dim, and where only the angles' amplitude knows of it.
    Json rope = {{"rope_scaling", {{"mscale_all_dim", nullptr}, {"mscale", nullptr}}}};
    EXPECT_EQ(changed("v3", rope).model.attention_scale(), 1 / std::sqrt(24.0));
    rope = {{"rope_parameters", {{"mscale", 1}, {"mscale_all_dim", 1}}}};
    const ModelConfig qwen = changed("qwen3", rope).model;
    EXPECT_EQ(qwen.rope_attention_factor, 1);
    EXPECT_EQ(qwen.attention_scale(), 0.25);
}

TEST(HfConfig, KnowsReleasedModels) {
    const Json v3 = {{"model_type", "deepseek_v3"},
                     {"max_position_embeddings", 163840},
                     {"rope_theta", 10000},
                     {"rope_scaling",
                      {{"type", "yarn"},
                       {"factor", 40},
                       {"original_max_position_embeddings", 4096},
                       {"beta_fast", 32},
                       {"beta_slow", 1},
                       {"mscale", 1.0},
                       {"mscale_all_dim", 1.0}}}};
    const ModelConfig model = parse(v3).model;
    EXPECT_NEAR(model.attention_scale(), 0.1352337789, 1e-9);
    EXPECT_EQ(model.layers, 61u);
    EXPECT_EQ(model.routed_experts, 256u);
}

TEST(HfConfig, RefusesByName) {
    struct Case {
        const char* model;
        Json patch;
        const char* message;
    };
    const std::vector<Case> cases = {
        {"v3", {{"model_type", "mamba"}}, "model_type = \"mamba\" is not supported"},
        {"v3", {{"model_type", nullptr}}, "model_type is missing"},
        {"v3", {{"hidden_size", "big"}}, "hidden_size = \"big\" is not a whole number"},
        {"v3", {{"hidden_size", -32}}, "hidden_size = -32 is not a whole number"},
        {"v3", {{"hidden_size", 32.5}}, "hidden_size = 32.5 is not a whole number"},
        {"v3", {{"hidden_size", 0}}, "hidden = 0"},
        {"v3", {{"num_hidden_layers", 2000}}, "layers = 2000"},
        {"v3", {{"num_hidden_layers", 1000000}}, "more than 262144 experts"},
        {"v3", {{"n_routed_experts", 1e15}}, "experts"},
        {"v3", {{"hidden_act", "gelu"}}, "hidden_act = \"gelu\" is not supported"},
        {"v3", {{"attention_bias", true}}, "attention_bias = true is not supported"},
        {"v3", {{"attention_dropout", 0.1}}, "attention_dropout = 0.1"},
        {"v3", {{"moe_layer_freq", 2}}, "moe_layer_freq = 2"},
        {"v3", {{"topk_method", "greedy"}}, "topk_method = \"greedy\" is not supported"},
        {"v3", {{"scoring_func", "softmax"}}, "scoring_func"},
        {"v3", {{"rope_interleave", false}}, "rope_interleave = false"},
        {"v3", {{"num_key_value_heads", 2}}, "num_key_value_heads = 2 must equal"},
        {"v3", {{"n_group", 3}}, "n_group = 3 does not divide"},
        {"v3", {{"new_attention", 1}}, "\"new_attention\" is a key that Bellows does not know"},
        {"v3", {{"rope_scaling", {{"type", "dynamic"}}}}, "rope_scaling.type = \"dynamic\""},
        {"v3", {{"rope_scaling", {{"rope_type", "llama3"}}}}, "contradicts type"},
        {"v3", {{"rope_scaling", {{"short_factor", 1}}}}, "rope_scaling.short_factor"},
        {"v3", {{"rope_scaling", {{"attention_factor", 2}}}}, "contradicts mscale"},
        {"v3", {{"rope_scaling", "yarn"}}, "rope_scaling = \"yarn\" is not an object"},
        {"v3", {{"rope_parameters", {{"rope_type", "default"}}}}, "stands beside rope_parameters"},
        {"v3", {{"quantization_config", {{"quant_method", "gptq"}}}}, "quant_method = \"gptq\""},
        {"v3",
         {{"quantization_config", {{"quant_method", "fp8"}}}},
         "weight_block_size is missing"},
        {"v3-fp8", {{"quantization_config", {{"weight_block_size", {64, 64}}}}}, "128 x 128"},
        {"v3-fp8", {{"quantization_config", {{"fmt", "e5m2"}}}}, "fmt = \"e5m2\""},
        {"v3-fp8", {{"quantization_config", {{"bits", 4}}}}, "quantization_config.bits = 4"},
        {"v2", {{"norm_topk_prob", true}}, "norm_topk_prob = true is not supported"},
        {"v2", {{"topk_method", "noaux_tc"}}, "topk_method"},
        {"llama", {{"mlp_bias", true}}, "mlp_bias = true"},
        {"llama", {{"sliding_window", 4096}}, "sliding_window = 4096"},
        {"llama", {{"num_key_value_heads", 3}}, "kv_heads = 3 does not divide"},
        {"llama3-tied", {{"rope_scaling", {{"factor", nullptr}}}}, "factor is missing"},
        {"qwen3", {{"use_sliding_window", true}}, "use_sliding_window = true"},
        {"qwen3", {{"layer_types", {"sliding_attention"}}}, "layer_types"},
        {"qwen3-moe", {{"mlp_only_layers", {1}}}, "mlp_only_layers = [1]"},
        {"qwen3-moe", {{"decoder_sparse_step", 2}}, "decoder_sparse_step = 2"},
    };
    for (const Case& refused : cases) {
        SCOPED_TRACE(refused.patch.dump());
        EXPECT_BELLOWS_ERROR(changed(refused.model, refused.patch), InvalidArgument,
                             refused.message);
    }
    for (const char* text : {"", "[]", "{", "{\"a\": NaN}", "\xff"})
        EXPECT_BELLOWS_ERROR(parse_hf_config(text, "config.json"), Corrupt, "config.json is no");
    EXPECT_BELLOWS_ERROR(parse_hf_config("{\"a\": 1, \"a\": 2}", "config.json"), Corrupt,
                         "\"a\" twice");
    const std::string deep = "{\"a\":" + std::string(100000, '[');
    EXPECT_BELLOWS_ERROR(parse_hf_config(deep, "config.json"), Corrupt, "nested more than");
}

TEST(HfConfig, WritesNoShapeThatNobodyHas) {
    const ModelConfig v3 = load_hf_config(hf_model("v3")).model;
    const ModelConfig qwen = load_hf_config(hf_model("qwen3-moe")).model;
    const auto refuses = [](ModelConfig model, auto change, const char* message) {
        change(model);
        EXPECT_BELLOWS_ERROR(hf_model_type(model), InvalidArgument, message);
    };
    refuses(v3, [](ModelConfig& m) { m.latent_norm_eps = 1e-5; }, "norms of latents");
    refuses(v3, [](ModelConfig& m) { m.router_bias = false; }, "without a router bias");
    refuses(v3, [](ModelConfig& m) { m.group_score = GroupScore::Max; }, "group_score");
    refuses(v3, [](ModelConfig& m) { m.score_function = ScoreFunction::Softmax; }, "router bias");
    refuses(qwen, [](ModelConfig& m) { m.shared_experts = 1; }, "shared experts");
    refuses(qwen, [](ModelConfig& m) { m.qk_norm = false; }, "without qk_norm");
    refuses(qwen, [](ModelConfig& m) { m.route_scale = 2; }, "route_scale");
}

TEST(HfConfig, JoinsTheEndsOfBothFiles) {
    TemporaryFolder folder;
    HfConfig config;
    config.eos = {7};
    EXPECT_EQ(end_tokens(folder.path(), config), std::vector<std::uint64_t>{7});
    folder.write("generation_config.json", "{\"eos_token_id\": [9, 7], \"temperature\": 0.6}");
    EXPECT_EQ(end_tokens(folder.path(), config), (std::vector<std::uint64_t>{7, 9}));
    folder.write("generation_config.json", "{\"eos_token_id\": \"x\"}");
    EXPECT_BELLOWS_ERROR(end_tokens(folder.path(), config), InvalidArgument, "eos_token_id");
}
