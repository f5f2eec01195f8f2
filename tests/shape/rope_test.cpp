// SPDX-License-Identifier: MIT
#include <bellows/shape/presets.hpp>
#include <bellows/shape/rope.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace bellows {
namespace {

/// DeepSeek-V2's and V3's rotation.
ModelConfig deepseek(double mscale) {
    ModelConfig config;
    config.qk_nope_head_dim = 128;
    config.qk_rope_head_dim = 64;
    config.rope_theta = 10000;
    config.rope_scaling = RopeScaling::Yarn;
    config.rope_factor = 40;
    config.rope_original_context = 4096;
    config.rope_mscale = mscale;
    config.rope_mscale_all_dim = mscale;
    return config;
}

void expect_close(double value, double expected) {
    EXPECT_NEAR(value / expected, 1, 1e-8) << value << " for " << expected;
}

TEST(Rope, PlainFrequencies) {
    ModelConfig config;
    config.qk_rope_head_dim = 8;
    config.rope_theta = 100;
    const std::vector<double> frequencies = rope_frequencies(config);
    ASSERT_EQ(frequencies.size(), 4u);
    EXPECT_EQ(frequencies[0], 1);
    expect_close(frequencies[2], 0.1);
    EXPECT_EQ(rope_amplitude(config), 1);
}

// Pairs 0 to 10 keep their frequency, from 23 on it is a fortieth.
TEST(Rope, YarnOfDeepSeek) {
    const std::vector<double> frequencies = rope_frequencies(deepseek(1));
    ASSERT_EQ(frequencies.size(), 32u);
    EXPECT_EQ(frequencies[0], 1);
    expect_close(frequencies[10], 0.0562341325);
    expect_close(frequencies[11], 0.0390069266);
    expect_close(frequencies[16], 0.0055);
    expect_close(frequencies[22], 1.77827941e-4);
    expect_close(frequencies[23], 3.33380358e-5);
    expect_close(frequencies[31], 3.33380358e-6);
}

TEST(Rope, AttentionScaleOfDeepSeek) {
    expect_close(deepseek(1).attention_scale(), 0.1352337789);
    expect_close(deepseek(0.707).attention_scale(), 0.1147213868);
    EXPECT_EQ(rope_amplitude(deepseek(0.707)), 1);
    ModelConfig none = deepseek(1);
    none.rope_scaling = RopeScaling::None;
    none.rope_factor = 1;
    EXPECT_EQ(none.attention_scale(), 1 / std::sqrt(192.0));
    expect_close(none.attention_scale(), 0.0721687836);
}

TEST(Rope, AmplitudeWithoutBothFactors) {
    ModelConfig config = deepseek(0);
    expect_close(rope_amplitude(config), 0.1 * std::log(40.0) + 1);
    EXPECT_EQ(rope_scale_amplitude(config), 1);
    config.rope_attention_factor = 1.25;
    EXPECT_EQ(rope_amplitude(config), 1.25);
    config.rope_mscale = 2; // alone it has no say
    EXPECT_EQ(rope_amplitude(config), 1.25);
    config.rope_mscale_all_dim = 1;
    expect_close(rope_amplitude(config), 1.7377758908 / 1.3688879454);
}

// Both borders of the ramp lie within one pair: with whole numbers pairs 19 and 20.
TEST(Rope, YarnWithEqualBetas) {
    ModelConfig config = deepseek(1);
    config.rope_theta = 50000;
    config.rope_factor = 32;
    config.rope_beta_fast = 1;
    const std::vector<double> frequencies = rope_frequencies(config);
    expect_close(frequencies[19], std::pow(50000, -38.0 / 64));
    expect_close(frequencies[20], std::pow(50000, -40.0 / 64) / 32);
    config.rope_truncate = false;
    EXPECT_TRUE(std::isfinite(rope_frequencies(config)[20]));
}

TEST(Rope, Llama3) {
    ModelConfig config;
    config.attention = AttentionKind::Gqa;
    config.head_dim = 128;
    config.rope_theta = 500000;
    config.rope_scaling = RopeScaling::Llama3;
    config.rope_factor = 8;
    config.rope_original_context = 8192;
    const std::vector<double> frequencies = rope_frequencies(config);
    ASSERT_EQ(frequencies.size(), 64u);
    const auto plain = [](double pair) { return std::pow(500000, -pair / 64); };
    for (const int pair : {0, 28})
        expect_close(frequencies[pair], plain(pair));
    for (const int pair : {35, 63})
        expect_close(frequencies[pair], plain(pair) / 8);
    const double turns = 8192 * plain(30) / (2 * std::numbers::pi), kept = (turns - 1) / 3;
    expect_close(frequencies[30], plain(30) * (kept + (1 - kept) / 8));
}

} // namespace
} // namespace bellows
