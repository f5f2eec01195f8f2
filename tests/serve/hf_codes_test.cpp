// SPDX-License-Identifier: MIT
// FP8 folders in FP8: linear layers keep the codes and scales of the file, and compute with them.
#include "checkpoint/coded_folder.hpp"
#include "serve/folder_model.hpp"
#include "support/temporary_folder.hpp"
#include "verify/reference/model.hpp"

#include <bellows/serve/language_model.hpp>

#include <cmath>
#include <cstdio>

namespace bellows {
namespace {

using testing::CodedFolder;
using testing::FolderModel;
using testing::read_back;

/// Every linear layer has blocks of its own but the dense gate and up projections of fewer than
/// 128 rows; columns and rows are ragged. All experts take every token, so that rounding sends none
/// elsewhere.
ModelConfig model_of_test(std::uint64_t dense_ffn = 128) {
    ModelConfig m;
    m.vocabulary = 64;
    m.hidden = 136;
    m.layers = 2;
    m.dense_layers = 1;
    m.heads = 4;
    m.q_lora_rank = 24;
    m.kv_lora_rank = 16;
    m.qk_nope_head_dim = 16;
    m.qk_rope_head_dim = 8;
    m.v_head_dim = 16;
    m.dense_ffn = dense_ffn;
    m.moe_ffn = 128;
    m.routed_experts = 4;
    m.shared_experts = 1;
    m.top_k = 4;
    m.route_scale = 2.5;
    m.max_context = 256;
    return m;
}

std::vector<std::uint32_t> text_of(std::size_t count) {
    std::vector<std::uint32_t> text;
    for (const std::int32_t token : reference::random_indices(count, 7, 64))
        text.push_back(static_cast<std::uint32_t>(token));
    return text;
}

/// The tensors of the file that a parameter is made of, one below the other.
std::vector<std::string> tensors_of(const std::string& name) {
    const std::size_t both = name.find("gate_up_proj");
    if (both == std::string::npos)
        return {name};
    std::string gate = name, up = name;
    return {gate.replace(both, 12, "gate_proj"), up.replace(both, 12, "up_proj")};
}

TEST(HfCodes, AreTheFilesOnTheDevice) {
    const TemporaryFolder path;
    const CodedFolder file(path.path(), model_of_test(48), "q_a_proj");
    const HfFolder folder(path.path());
    World world = World::single();
    FolderModel model(folder, world, 8, linear_forms(folder));
    std::size_t codes = 0, quantised = 0, plain = 0;
    for (const Parameter& parameter : model.parameters().all()) {
        const ParameterInfo& info = parameter.info;
        SCOPED_TRACE(info.name);
        if (!is_linear(info))
            continue;
        if (info.name.find("kv_b_proj") != std::string::npos) {
            ASSERT_FALSE(parameter.quantized);
            std::vector<std::uint16_t> values(info.size());
            folder.read(info, 0, values);
            EXPECT_EQ(read_back<std::uint16_t>(model.device(), parameter.compute.buffer), values);
            ++plain;
            continue;
        }
        ASSERT_TRUE(parameter.quantized);
        const bool apart = info.name == "model.layers.0.mlp.gate_up_proj.weight";
        ASSERT_EQ(parameter.quantized->recipe, apart ? kWeightsRecipe : kStoredWeightsRecipe);
        if (apart) {
            ++quantised;
            continue;
        }
        std::vector<std::uint8_t> rows;
        std::vector<float> scales;
        for (const std::string& tensor : tensors_of(info.name)) {
            rows.insert(rows.end(), file.bytes(tensor).begin(), file.bytes(tensor).end());
            const std::vector<float> more = file.scales(tensor);
            scales.insert(scales.end(), more.begin(), more.end());
        }
        const TensorView& view = parameter.quantized->codes;
        const auto there = read_back<std::uint8_t>(model.device(), view.buffer);
        const std::uint64_t columns = info.shape[1];
        for (std::uint64_t row = 0; row < info.shape[0]; ++row)
            for (std::uint64_t column = 0; column < view.stride[0]; ++column)
                ASSERT_EQ(there[row * view.stride[0] + column],
                          column < columns ? rows[row * columns + column] : 0)
                    << "row " << row << ", column " << column;
        auto kept = read_back<float>(model.device(), parameter.quantized->scales.buffer);
        kept.resize(scales.size()); // without padding
        EXPECT_EQ(kept, scales);
        ++codes;
    }
    EXPECT_EQ(codes, 2 * 4 + 1 + 4 * 2 + 2u);
    EXPECT_EQ(quantised, 1u);
    EXPECT_EQ(plain, 2u);
}

/// The relative error of logits.
double error_of(const std::vector<float>& logits, const reference::Vector& exact) {
    double difference = 0, sum = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
        difference += (logits[i] - exact[i]) * (logits[i] - exact[i]);
        sum += exact[i] * exact[i];
    }
    return std::sqrt(difference / sum);
}

/// Against f64 with the weights that the file's codes and scales stand for, what is left is the
/// rounding of activations; weights that are quantised again add as much once more.
TEST(HfCodes, ComputeWithTheFilesValues) {
    const TemporaryFolder path;
    const CodedFolder file(path.path(), model_of_test());
    const HfFolder folder(path.path());
    const ModelConfig& config = folder.config().model;
    reference::Parameters values;
    for (const ParameterInfo& info : parameters(config)) {
        EXPECT_EQ(is_linear(info), folder.has_codes(info)) << info.name;
        std::vector<float> read(info.size());
        folder.read(info, 0, read);
        values[info.name] = reference::to_double(read);
    }
    World world = World::single();
    const auto again = [](const ParameterInfo& info) {
        return info.name.find("kv_b_proj") == std::string::npos ? LinearForm::PowerOfTwo
                                                                : LinearForm::Plain;
    };
    std::vector<std::string> classes; // those with matrix units round decoded weights to bf16
    for (const GemmClass& c : gemm_classes(*testing::make_device()))
        if (c.why_not.empty())
            classes.push_back(c.name);
    // Few rows and many: products by other variants.
    for (const std::size_t count : {std::size_t{12}, std::size_t{140}}) {
        const std::vector<std::uint32_t> text = text_of(count);
        reference::Batch batch{.batch = 1, .seq = count, .tokens = {}, .targets = {}};
        batch.tokens.assign(text.begin(), text.end());
        batch.targets.assign(count, -1);
        batch.targets[0] = 0;
        const reference::Vector exact = reference::model_forward(config, values, batch).logits;
        for (const std::string& products : classes) {
            const auto error = [&](const LinearForms& forms) {
                FolderModel model(folder, world, count, forms, products);
                return error_of(model.logits(text), exact);
            };
            const double kept = error(linear_forms(folder)), requantised = error(again);
            std::printf("%s, %zu tokens, error of logits: %.4f by the file's codes, "
                        "%.4f requantised\n",
                        products.c_str(), count, kept, requantised);
            EXPECT_GT(kept, 0);
            EXPECT_LT(kept, 0.13); // some ten products in a row, each of activations within 3 %
            EXPECT_LT(kept, 0.85 * requantised);
        }
    }
}

TEST(HfCodes, AreWhatGenerateComputesWith) {
    const TemporaryFolder path;
    const CodedFolder file(path.path(), model_of_test());
    const HfFolder folder(path.path());
    World world = World::single();
    const std::vector<std::uint32_t> text = text_of(12);
    const auto logits = FolderModel(folder, world, 12, linear_forms(folder)).logits(text);
    LanguageModelOptions options;
    options.precision = Precision::FP8;
    options.seq = 12;
    LanguageModel model(testing::test_options(), path.path(), options);
    const std::vector<float> next = model.next(text);
    EXPECT_TRUE(std::equal(next.begin(), next.end(), logits.end() - 64));
}

/// Heads of 16 rows, which are read in another order, stay in their blocks.
TEST(HfCodes, ComeInTheOrderOfRotatedPairs) {
    ModelConfig m = model_of_test();
    m.attention = AttentionKind::Gqa;
    m.kv_heads = 2;
    m.head_dim = 40;
    m.heads = 4;
    m.q_lora_rank = m.kv_lora_rank = m.qk_nope_head_dim = m.qk_rope_head_dim = m.v_head_dim = 0;
    m.dense_layers = m.layers;
    m.moe_ffn = m.routed_experts = m.shared_experts = m.top_k = 0;
    m.route_scale = 1;
    for (const std::uint64_t head : {16u, 40u}) {
        m.head_dim = head;
        const TemporaryFolder path;
        const CodedFolder file(path.path(), m);
        const HfFolder folder(path.path());
        for (const ParameterInfo& info : parameters(folder.config().model)) {
            SCOPED_TRACE(info.name);
            const bool rotated = info.name.find("q_proj") != std::string::npos ||
                                 info.name.find("k_proj") != std::string::npos;
            ASSERT_EQ(folder.has_codes(info), is_linear(info) && !(rotated && head == 40));
            if (!folder.has_codes(info))
                continue;
            const std::uint64_t rows = info.shape[0], columns = info.shape[1];
            std::vector<std::uint8_t> codes(info.size());
            folder.read_codes(info, 0, codes);
            std::vector<float> scales((rows + 127) / 128 * ((columns + 127) / 128)),
                values(info.size());
            folder.read_scales(info, scales);
            folder.read(info, 0, values);
            for (std::uint64_t i = 0; i < codes.size(); ++i) {
                const float scale =
                    scales[i / columns / 128 * ((columns + 127) / 128) + i % columns / 128];
                ASSERT_EQ(fp8::decode(fp8::Format::E4M3, codes[i]) * scale, values[i]) << i;
            }
        }
    }
}

} // namespace
} // namespace bellows
