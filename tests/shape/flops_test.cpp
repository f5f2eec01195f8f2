// SPDX-License-Identifier: MIT
// The operations that a model's formula takes, by part: published totals of DeepSeek-V3 and counts
// by hand of others.

#include <bellows/shape/flops.hpp>
#include <bellows/shape/parameters.hpp>
#include <bellows/shape/presets.hpp>

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

namespace bellows {
namespace {

constexpr double kGiga = 1e9;

ModelConfig preset(const std::string& name) {
    return parse_model_config(preset_text(name), name);
}

TEST(Flops, OfDeepSeekV3AsPublished) {
    const ModelConfig v3 = preset("v3-671b");
    // The published figures leave the token itself out: half of the sequence, not (s + 1) / 2.
    const FlopsByPart causal = forward_flops(v3, 4096 / 2.0);
    EXPECT_NEAR(causal.total() / kGiga, 83.483, 5e-4);
    EXPECT_NEAR(training_flops(causal) / kGiga, 250.45, 5e-3);
    EXPECT_NEAR(forward_flops(v3, 4096).total() / kGiga, 93.717, 5e-4) << "full attention";
    EXPECT_NEAR(forward_flops(v3, 8192 / 2.0).total() / kGiga, 93.717, 5e-4);
    // With the token itself.
    const FlopsByPart exact = forward_flops(v3, mean_visible_keys(4096));
    EXPECT_DOUBLE_EQ(exact.attention_core, 61.0 * 128 * (192 + 128) * 4097);
    EXPECT_NEAR(exact.total() / kGiga, 83.486, 5e-4);
    EXPECT_DOUBLE_EQ(training_flops_per_token(v3, 4096), training_flops(exact));
    // Its 1541.7 tokens per second and GPU are 386 TFLOP/s.
    EXPECT_NEAR(training_flops(exact) * 1541.7 * 1e-12, 386, 0.5);
    // Flash attention's gradients take half of the core's operations more.
    EXPECT_DOUBLE_EQ(hardware_training_flops(exact),
                     training_flops(exact) + 0.5 * exact.attention_core);
}

TEST(Flops, OfTheExpertsAndTheSharedOnesApart) {
    const FlopsByPart tiny = forward_flops(preset("tiny"), mean_visible_keys(128));
    // Queries 64x128 and 4*48x64, keys and values 80x128 and 4*64x64, output 128x4*32.
    EXPECT_DOUBLE_EQ(tiny.attention_projections, 2.0 * 4 * (8192 + 12288 + 10240 + 16384 + 16384));
    EXPECT_DOUBLE_EQ(tiny.attention_core, 2.0 * 4 * 4 * (48 + 32) * 64.5);
    EXPECT_DOUBLE_EQ(tiny.router, 2.0 * 3 * 8 * 128);
    EXPECT_DOUBLE_EQ(tiny.experts, 2.0 * 3 * 2 * 3 * 128 * 128);
    EXPECT_DOUBLE_EQ(tiny.shared_experts, 2.0 * 3 * 3 * 128 * 128);
    EXPECT_DOUBLE_EQ(tiny.dense_ffn, 2.0 * 3 * 128 * 384);
    EXPECT_DOUBLE_EQ(tiny.head, 2.0 * 256 * 128);
    EXPECT_DOUBLE_EQ(tiny.total(), tiny.matrices() + tiny.attention_core);
}

TEST(Flops, OfTheModelOfTheBenchmarks) {
    const ModelConfig config = load_model_config(BELLOWS_MOE_1B3);
    const FlopsByPart flops = forward_flops(config, mean_visible_keys(4096));
    EXPECT_DOUBLE_EQ(flops.attention_projections,
                     2.0 * 8 * (1048576 + 1572864 + 1179648 + 2097152 + 4194304));
    EXPECT_DOUBLE_EQ(flops.attention_core, 8.0 * 16 * (192 + 128) * 4097);
    EXPECT_DOUBLE_EQ(flops.router, 2.0 * 8 * 32 * 2048);
    EXPECT_DOUBLE_EQ(flops.experts, 2.0 * 8 * 8 * 3 * 2048 * 768);
    EXPECT_DOUBLE_EQ(flops.shared_experts, 2.0 * 8 * 3 * 2048 * 768);
    EXPECT_DOUBLE_EQ(flops.dense_ffn, 0);
    EXPECT_DOUBLE_EQ(flops.head, 2.0 * 4096 * 2048);
}

TEST(Flops, OfModulesThatPredictFurtherTokens) {
    ModelConfig tiny = preset("tiny");
    const FlopsByPart without = forward_flops(tiny, mean_visible_keys(128));
    tiny.mtp_depth = 2;
    const FlopsByPart flops = forward_flops(tiny, mean_visible_keys(128));
    EXPECT_DOUBLE_EQ(flops.head, 3 * without.head);
    EXPECT_DOUBLE_EQ(flops.mtp_projections, 2.0 * 2 * 128 * 256);
    EXPECT_DOUBLE_EQ(flops.attention_core, 6.0 / 4 * without.attention_core);
    EXPECT_DOUBLE_EQ(flops.attention_projections, 6.0 / 4 * without.attention_projections);
    EXPECT_DOUBLE_EQ(flops.experts, 5.0 / 3 * without.experts) << "one layer of four is dense";
    EXPECT_DOUBLE_EQ(flops.dense_ffn, without.dense_ffn);
}

TEST(Flops, OfGroupedQueriesAndTiedEmbeddings) {
    ModelConfig llama = preset("llama3-8b");
    const FlopsByPart flops = forward_flops(llama, 100);
    EXPECT_DOUBLE_EQ(flops.attention_projections, 2.0 * 32 * (2 * 4096 + 2 * 1024) * 4096);
    EXPECT_DOUBLE_EQ(flops.attention_core, 2.0 * 32 * 32 * (128 + 128) * 100);
    EXPECT_DOUBLE_EQ(flops.dense_ffn, 2.0 * 32 * 3 * 4096 * 14336);
    EXPECT_DOUBLE_EQ(flops.experts + flops.shared_experts + flops.router, 0);
    EXPECT_DOUBLE_EQ(flops.head, 2.0 * 128256 * 4096);
    llama.tied_embeddings = true;
    EXPECT_EQ(forward_flops(llama, 100), flops);
}

TEST(Flops, KeysThatATokenSeesInPackedDocuments) {
    EXPECT_DOUBLE_EQ(mean_visible_keys(1), 1);
    EXPECT_DOUBLE_EQ(mean_visible_keys(4096), 2048.5);
    EXPECT_DOUBLE_EQ(mean_visible_keys(0), 0);
    const std::array<std::uint64_t, 3> documents{3, 1, 4}; // 6 + 1 + 10 keys of 8 tokens
    EXPECT_DOUBLE_EQ(mean_visible_keys(documents), 17.0 / 8);
    const std::array<std::uint64_t, 1> whole{8};
    EXPECT_DOUBLE_EQ(mean_visible_keys(whole), 4.5);
}

} // namespace
} // namespace bellows
