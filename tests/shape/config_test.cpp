// SPDX-License-Identifier: MIT
// The model configuration: what is read, what is refused and with which words, and the published
// parameter counts of the presets.

#include <bellows/base/error.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/parameters.hpp>
#include <bellows/shape/presets.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <span>

namespace bellows {
namespace {

const char* const kSmall = R"(# line 1
[model]
vocabulary = 64
hidden = 16
layers = 3
dense_layers = 1
heads = 2
kv_lora_rank = 8
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
dense_ffn = 24
moe_ffn = 8
routed_experts = 6
shared_experts = 1
top_k = 2
)";

std::string refusal(const std::string& text) {
    try {
        parse_model_config(text, "some.toml");
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.message();
        return error.message();
    }
    ADD_FAILURE() << "accepted:\n" << text;
    return "";
}

/// kSmall with the line of `key` replaced by `line` (or `line` appended when there is none).
std::string with(const std::string& key, const std::string& line) {
    std::string text = kSmall;
    const std::size_t begin = text.find("\n" + key + " =");
    if (begin == std::string::npos)
        return text + line + "\n";
    const std::size_t end = text.find('\n', begin + 1);
    return text.replace(begin + 1, end - begin - 1, line);
}

TEST(ModelConfig, PublishedParameterCounts) {
    const ModelConfig v3 = load_model("v3-671b");
    const ParameterCount count = count_parameters(v3);
    EXPECT_EQ(count.total, 671026419200u);
    EXPECT_EQ(count.active, 37552297472u);
    EXPECT_EQ(count.attention_per_layer, 187107328u);
    EXPECT_EQ(count.embedding, 2u * 129280 * 7168);
    EXPECT_EQ(count.expert, 44040192u);
    EXPECT_EQ(count.dense_ffn_per_layer, 396361728u);

    const ParameterCount lite = count_parameters(load_model("v2-lite"));
    EXPECT_EQ(lite.total, 15706484224u);
    EXPECT_EQ(lite.active, 2661150208u);

    EXPECT_EQ(count_parameters(load_model("llama3-8b")).total, 8030261248u);
    EXPECT_EQ(count_parameters(load_model("qwen3-30b-a3b")).total, 30532122624u);
}

TEST(ModelConfig, TinySuitsTheDemo) {
    const ModelConfig tiny = load_model("tiny");
    EXPECT_EQ(tiny.vocabulary, 256u) << "bytes";
    EXPECT_GE(tiny.layers, 2u) << "two pipeline stages must fit";
    EXPECT_GE(tiny.dense_layers, 1u);
    EXPECT_GT(tiny.moe_layers(), 0u);
    EXPECT_EQ(tiny.routed_experts % 4, 0u) << "four ranks";
    for (const std::uint64_t size :
         {tiny.hidden, tiny.q_lora_rank, tiny.kv_lora_rank, tiny.qk_nope_head_dim,
          tiny.qk_rope_head_dim, tiny.v_head_dim, tiny.dense_ffn, tiny.moe_ffn})
        EXPECT_EQ(size % 16, 0u) << size;
}

TEST(ModelConfig, DefaultsAndRoundTrip) {
    const ModelConfig small = parse_model_config(kSmall, "some.toml");
    EXPECT_EQ(small.q_lora_rank, 0u);
    EXPECT_EQ(small.score_function, ScoreFunction::Sigmoid);
    EXPECT_DOUBLE_EQ(small.attention_scale(), 0.25);
    for (const std::string& name : preset_names()) {
        const ModelConfig config = load_model(name);
        EXPECT_EQ(parse_model_config(to_toml(config), name), config) << to_toml(config);
    }
    ModelConfig odd = small;
    odd.route_scale = 1.0 / 3;
    odd.norm_eps = 1e-5;
    odd.tied_embeddings = true;
    EXPECT_EQ(parse_model_config(to_toml(odd), "odd"), odd) << to_toml(odd);
}

TEST(ModelConfig, TableOfRefusals) {
    struct Case {
        std::string text;
        std::vector<std::string> says; ///< all of these stand in the message
    };
    const std::vector<Case> cases = {
        {with("hiden", "hiden = 16"), {"some.toml:17:", "\"hiden\"", "\"hidden\"", "[model]"}},
        {with("context_window", "context_window = 16"), {"\"context_window\"", "there are: "}},
        {with("h", "\"hid\\nden\" = 1"), {"some.toml:17:", R"("hid\x0aden")", "\"hidden\""}},
        {with("norm_eps", "norm_eps = 1e-320"), {"norm_eps = "}},
        {"[modl]\n", {"some.toml:1:", "\"modl\"", "\"model\""}},
        {"", {"some.toml", "[model]"}},
        {"[model]\nhidden = \n", {"some.toml:2:"}},
        {"[model]\n[#%part", {"some.toml:2:"}},
        {"[model]\nhidden = 16\n", {"some.toml:1:", "vocabulary"}},
        {with("hidden", "hidden = 20"), {"some.toml:4:", "hidden = 20", "8", "16 or 24"}},
        {with("hidden", "hidden = -8"), {"some.toml:4:", "hidden = -8", "negative"}},
        {with("hidden", "hidden = 16.0"), {"some.toml:4:", "hidden", "whole number"}},
        {with("hidden", "hidden = 0"), {"some.toml:4:", "hidden = 0", "between 8 and"}},
        {with("hidden", "hidden = 9223372036854775800"), {"some.toml:4:", "between"}},
        {with("layers", "layers = \"3\""), {"some.toml:5:", "layers", "string"}},
        {with("dense_layers", "dense_layers = 4"), {"dense_layers = 4", "layers = 3"}},
        {with("dense_ffn", "dense_ffn = 0"), {"dense_ffn = 0"}},
        {with("routed_experts", "routed_experts = 0"), {"routed_experts = 0"}},
        {with("n_group", "n_group = 4"), {"some.toml:17:", "n_group = 4", "6"}},
        {with("n_group", "n_group = 3\ntopk_group = 4"), {"topk_group = 4", "n_group = 3"}},
        {with("top_k", "top_k = 3\nn_group = 3"), {"top_k = 3", "the 2 experts"}},
        {with("top_k", "top_k = 0"), {"top_k = 0"}},
        {with("top_k", "top_k = 65"), {"top_k = 65", "64"}},
        {with("score_function", "score_function = \"tanh\""), {"sigmoid", "softmax"}},
        {with("router_bias", "router_bias = 1"), {"router_bias", "true or false"}},
        {with("router_bias", "router_bias = false"), {"bias_update_rate", "router_bias"}},
        {with("norm_eps", "norm_eps = nan"), {"some.toml:17:", "norm_eps = nan"}},
        {with("norm_eps", "norm_eps = inf"), {"norm_eps = inf"}},
        {with("rope_theta", "rope_theta = 0.5"), {"rope_theta = 0.5"}},
    };
    for (const Case& c : cases) {
        const std::string message = refusal(c.text);
        for (const std::string& part : c.says)
            EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
        EXPECT_EQ(message.find('\n'), std::string::npos) << "more than one line: " << message;
    }
}

TEST(ModelConfig, SparesAShareOfTheSequences) {
    ModelConfig config;
    const auto spared = [&](double share) {
        config.capacity_spares = share;
        std::uint64_t count = 0;
        for (std::uint64_t sequence = 0; sequence < 10'000; ++sequence)
            count += config.spares(sequence) ? 1 : 0;
        return static_cast<double>(count);
    };
    EXPECT_EQ(spared(0), 0);
    EXPECT_EQ(spared(1), 10'000);
    EXPECT_NEAR(spared(0.1), 1000, 150) << "five standard errors";
}

TEST(ModelConfig, OtherTablesAreLeftAlone) {
    const std::string text = std::string(kSmall) + "[train]\nlr = 1.0\n";
    EXPECT_NO_THROW(parse_model_config(text, "some.toml"));
    EXPECT_THROW(parse_model_config(text, "some.toml", {}), Error);
}

TEST(ModelConfig, PresetOrFile) {
    EXPECT_EQ(preset_names(),
              (std::vector<std::string>{"llama3-8b", "moonlight", "qwen3-30b-a3b", "tiny",
                                        "tiny-deepseek-v2", "tiny-llama", "tiny-qwen3",
                                        "tiny-qwen3-moe", "v2-lite", "v3-671b"}));
    const auto file = std::filesystem::path(testing::TempDir()) / "bellows_config_small.toml";
    std::ofstream(file) << kSmall;
    EXPECT_EQ(load_model(file.string()), parse_model_config(kSmall, "some.toml"));
    std::filesystem::remove(file);
    const auto message = [](const auto& call) {
        try {
            call();
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
            return error.message();
        }
        return std::string("nothing was thrown");
    };
    EXPECT_EQ(message([] { load_model("tyni"); }),
              "\"tyni\" is neither a file nor a preset (llama3-8b, moonlight, qwen3-30b-a3b, tiny, "
              "tiny-deepseek-v2, tiny-llama, tiny-qwen3, tiny-qwen3-moe, v2-lite, v3-671b)");
    EXPECT_NE(message([] { preset_text("v3"); }).find("\"v3\""), std::string::npos);
}

TEST(ModelConfig, FilesThatCannotServe) {
    const auto code = [](const std::filesystem::path& file) {
        try {
            load_model_config(file);
        } catch (const Error& error) {
            return error.code();
        }
        return ErrorCode::Internal;
    };
    const auto folder = std::filesystem::path(testing::TempDir());
    const auto big = folder / "bellows_config_too_big.toml";
    std::ofstream(big) << std::string((1u << 20) + 1, '#');
    EXPECT_EQ(code(big), ErrorCode::InvalidArgument);
    std::filesystem::remove(big);
    EXPECT_EQ(code(folder), ErrorCode::Io);
    EXPECT_EQ(code(folder / "bellows_no_such_file.toml"), ErrorCode::Io);
}

TEST(Parameters, NamesAndShapes) {
    const ModelConfig small = parse_model_config(kSmall, "some.toml");
    const std::vector<ParameterInfo> list = parameters(small);
    std::set<std::string> names;
    std::uint64_t total = 0;
    for (const ParameterInfo& p : list) {
        EXPECT_TRUE(names.insert(p.name).second) << p.name << " twice";
        total += p.size();
        const bool matrix = p.shape.size() == 2;
        EXPECT_EQ(p.weight_decay, matrix) << p.name;
        EXPECT_EQ(p.init_std > 0, matrix) << p.name;
        EXPECT_EQ(p.init_mean, p.kind == ParameterKind::Norm ? 1.0 : 0.0) << p.name;
        EXPECT_EQ(p.kind == ParameterKind::Expert, p.expert >= 0) << p.name;
    }
    EXPECT_EQ(total, count_parameters(small).total);
    EXPECT_EQ(list.front().name, "model.embed_tokens.weight");
    EXPECT_EQ(list.back().name, "lm_head.weight");

    const auto find = [&](const std::string& name) {
        for (const ParameterInfo& p : list)
            if (p.name == name)
                return p;
        ADD_FAILURE() << name << " is missing";
        return ParameterInfo{};
    };
    const ParameterInfo expert = find("model.layers.2.mlp.experts.5.gate_up_proj.weight");
    EXPECT_EQ(expert.shape, (std::vector<std::uint64_t>{16, 16}));
    EXPECT_EQ(expert.layer, 2);
    EXPECT_EQ(expert.expert, 5);
    EXPECT_EQ(find("model.layers.0.mlp.gate_up_proj.weight").shape,
              (std::vector<std::uint64_t>{48, 16}));
    EXPECT_EQ(find("model.layers.1.self_attn.kv_a_proj_with_mqa.weight").shape,
              (std::vector<std::uint64_t>{16, 16}));
    EXPECT_FALSE(find("model.layers.1.mlp.gate.e_score_correction_bias").trainable());

    EXPECT_EQ(list.back().init_std, small.init_std);
    ModelConfig quiet = small;
    quiet.head_init_std = 0.001;
    EXPECT_EQ(parameters(quiet).back().init_std, 0.001);
    EXPECT_EQ(parameters(quiet).front().init_std, small.init_std);

    ModelConfig tied = small;
    tied.tied_embeddings = true;
    EXPECT_EQ(parameters(tied).size() + 1, list.size());
}

TEST(Parameters, InitialValues) {
    const ModelConfig tiny = load_model("tiny");
    const std::vector<ParameterInfo> list = parameters(tiny);
    const std::vector<float> a = initial_values(list[0], 1);
    EXPECT_EQ(a, initial_values(list[0], 1));
    EXPECT_NE(a, initial_values(list[0], 2));
    std::vector<float> part(a.size() / 3); // from an odd element on
    fill_initial_values(list[0], 1, part, 7);
    EXPECT_TRUE(std::ranges::equal(part, std::span(a).subspan(7, part.size())));
    double sum = 0, squares = 0, fourths = 0;
    for (const float value : a) {
        const double z = value / list[0].init_std;
        sum += z;
        squares += z * z;
        fourths += z * z * z * z;
    }
    const auto n = static_cast<double>(a.size()); // 32768: the bounds are five standard errors
    EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n));
    EXPECT_NEAR(squares / n, 1, 5 * std::sqrt(2 / n));
    EXPECT_NEAR(fourths / n, 2.9, 5 * std::sqrt(90 / n)) << "3 - 6/(5*12)";

    ParameterInfo renamed = list[0];
    renamed.name += "x";
    EXPECT_NE(a, initial_values(renamed, 1));
    for (const ParameterInfo& p : list) {
        if (p.kind == ParameterKind::Norm) {
            EXPECT_EQ(initial_values(p, 1), std::vector<float>(p.size(), 1.0f)) << p.name;
        }
    }
}

TEST(Parameters, FlopsPerToken) {
    ModelConfig small = parse_model_config(kSmall, "some.toml");
    // Per layer q 32x16, kv_a 16x16, kv_b 32x8, o 16x16; dense 72x16; MoE: router 6x16, two routed
    // and one shared expert of 3*8*16; head 64x16; attention sees (7+1)/2 keys of 2 heads of 16+8.
    const double layer = 512 + 256 + 256 + 256;
    const double elements = 3 * layer + 1152 + 2 * (96 + 3 * 384) + 1024;
    EXPECT_DOUBLE_EQ(training_flops_per_token(small, 7), 6 * (elements + 3 * 2 * 24 * 4));
    const double untied = training_flops_per_token(small, 7);
    small.tied_embeddings = true;
    EXPECT_DOUBLE_EQ(training_flops_per_token(small, 7), untied);
}

} // namespace
} // namespace bellows
