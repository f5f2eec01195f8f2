// SPDX-License-Identifier: MIT
// Choosing tokens: what no table of settings shows. Rows alone and together, distributions over
// many seeds, rows without a choice, refusals.

#include "engine/ops/sampling_form.hpp"
#include "support/op_test.hpp"
#include "verify/checks/sampling_rows.hpp"

#include <bellows/engine/sampling.hpp>

#include <array>
#include <cmath>
#include <limits>
#include <string>

namespace bellows {
namespace {

using checks::sample_rows;
using checks::SampledRows;
using reference::SampleRow;
using testing::OpTensor;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class OpsSampling : public testing::OpTest {
protected:
    /// The same logits for all rows.
    static SampledRows sample(const std::vector<float>& logits, const std::vector<SampleRow>& rows,
                              std::uint64_t top_n = 0) {
        std::vector<float> all;
        for (std::size_t r = 0; r < rows.size(); ++r)
            all.insert(all.end(), logits.begin(), logits.end());
        return sample_rows(rig(), all, logits.size(), rows, top_n);
    }
};

TEST_F(OpsSampling, ReferenceGeneratorIsPhilox) { // the known answers of Random123
    using Words = std::array<std::uint32_t, 4>;
    EXPECT_EQ(reference::philox({0, 0, 0, 0}, {0, 0}),
              (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    const std::uint32_t ones = 0xffffffff;
    EXPECT_EQ(reference::philox({ones, ones, ones, ones}, {ones, ones}),
              (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

/// Rows that differ in all settings, by 4500 logits.
std::vector<SampleRow> mixed_rows() {
    std::vector<SampleRow> rows{{.temperature = 0},
                                {},
                                {.temperature = 0.7, .top_p = 0.9},
                                {.top_k = 50},
                                {.min_p = 0.02},
                                {.temperature = 2, .top_p = 0.999, .top_k = 3000},
                                {.temperature = 0, .repetition_penalty = 1.3},
                                {.top_k = 5, .frequency_penalty = 1, .presence_penalty = 1},
                                {.temperature = 100, .top_p = 0.5}};
    for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r].seed = 5 * r + 1;
        rows[r].position = static_cast<std::uint32_t>(r);
        for (std::uint32_t t = 0; t < 100 * r; ++t)
            rows[r].history.emplace_back(3 * t, t % 3);
        for (std::uint32_t t = 0; t < 10 * (9 - r); ++t)
            rows[r].biases.emplace_back(7 * t, t % 4);
    }
    return rows;
}
constexpr std::uint64_t kMixedVocabulary = 4500;

void expect_same(const SampledRows& actual, const SampledRows& expected) {
    EXPECT_EQ(actual.tokens, expected.tokens);
    EXPECT_EQ(actual.log_probs, expected.log_probs);
    EXPECT_EQ(actual.top_tokens, expected.top_tokens);
    EXPECT_EQ(actual.top_log_probs, expected.top_log_probs);
}

TEST_F(OpsSampling, RowsOfDifferentSettingsEqualThemselvesAlone) {
    const std::vector<SampleRow> rows = mixed_rows();
    const auto logits = random(DType::F32, rows.size() * kMixedVocabulary, 9, -5, 9);
    const SampledRows together = sample_rows(rig(), logits, kMixedVocabulary, rows, 20);
    SampledRows alone;
    for (std::size_t r = 0; r < rows.size(); ++r) {
        const auto first = logits.begin() + static_cast<std::ptrdiff_t>(r * kMixedVocabulary);
        const SampledRows one =
            sample_rows(rig(), {first, first + kMixedVocabulary}, kMixedVocabulary, {rows[r]}, 20);
        const auto append = [](auto& all, const auto& more) {
            all.insert(all.end(), more.begin(), more.end());
        };
        append(alone.tokens, one.tokens);
        append(alone.log_probs, one.log_probs);
        append(alone.top_tokens, one.top_tokens);
        append(alone.top_log_probs, one.top_log_probs);
    }
    expect_same(alone, together);
}

TEST_F(OpsSampling, NeitherTheGridNorTheWorkgroupsShow) {
    const std::vector<SampleRow> rows = mixed_rows();
    const auto logits = random(DType::F32, rows.size() * kMixedVocabulary, 10, -5, 9);
    const SampledRows expected = sample_rows(rig(), logits, kMixedVocabulary, rows, 20);
    for (const ops::SampleForm& form : {ops::SampleForm{128, 16, 5}, ops::SampleForm{64, 128, 1}})
        expect_same(sample_rows(rig(), logits, kMixedVocabulary, rows, 20,
                                [&](Recording& recording, const ops::SampleBatch& batch,
                                    BufferView workspace) {
                                    ops::sample(recording, batch, workspace, form);
                                }),
                    expected);
}

// Chi-square of the draws of many seeds. The bound is the 99.99 % point, about; seeds are fixed.
TEST_F(OpsSampling, DrawsFollowTheProbabilities) {
    const std::vector<float> logits = random(DType::F32, 40, 3, -2, 2);
    for (const SampleRow& settings :
         {SampleRow{}, SampleRow{.temperature = 0.6}, SampleRow{.top_p = 0.8},
          SampleRow{.top_k = 9}, SampleRow{.min_p = 0.2},
          SampleRow{.temperature = 1.4, .top_p = 0.9, .min_p = 0.05, .top_k = 20}}) {
        const std::size_t draws = 4000;
        std::vector<SampleRow> rows(draws, settings);
        for (std::size_t r = 0; r < draws; ++r) { // seeds and positions
            rows[r].seed = r / 10;
            rows[r].position = static_cast<std::uint32_t>(r % 10);
        }
        const auto tokens = sample(logits, rows).tokens;
        const auto expected =
            reference::sample(std::vector<double>(logits.begin(), logits.end()), settings)
                .probabilities;
        std::vector<double> seen(logits.size());
        for (const std::uint32_t token : tokens)
            ++seen.at(token);
        double square = 0, freedom = -1;
        for (std::size_t t = 0; t < seen.size(); ++t) {
            const double mean = expected[t] * static_cast<double>(draws);
            if (mean == 0) {
                EXPECT_EQ(seen[t], 0) << "token " << t << " is cut";
                continue;
            }
            square += (seen[t] - mean) * (seen[t] - mean) / mean;
            ++freedom;
        }
        EXPECT_LT(square, freedom + 4 * std::sqrt(2 * freedom) + 8) << freedom;
    }
}

TEST_F(OpsSampling, EqualLogitsGoToTheLowestId) {
    const auto equal = sample(std::vector<float>(3000, 1.5f), {{.temperature = 0}}, 4);
    EXPECT_EQ(equal.tokens[0], 0u);
    EXPECT_EQ(equal.top_tokens, (std::vector<std::uint32_t>{0, 1, 2, 3}));
    std::vector<float> zeros(3000, -1.0f);
    zeros[2500] = 0.0f;
    zeros[10] = -0.0f; // the same number
    EXPECT_EQ(sample(zeros, {{.temperature = 0}}).tokens[0], 10u);
}

TEST_F(OpsSampling, RowsWithoutAChoice) {
    const std::uint64_t vocabulary = 3000;
    std::vector<float> plain(vocabulary, 0.5f), nan = plain, infinite = plain;
    nan[2900] = std::nanf("");
    infinite[5] = kInfinity;
    const std::vector<float> none(vocabulary, -kInfinity);
    SampleRow forbidden;
    for (std::uint32_t t = 0; t < vocabulary; ++t)
        forbidden.biases.emplace_back(t, -std::numeric_limits<double>::infinity());
    for (const SampleRow& settings :
         {SampleRow{}, SampleRow{.temperature = 0}, SampleRow{.top_p = 0.5, .top_k = 3}}) {
        for (const auto& logits : {nan, infinite, none}) {
            const SampledRows sampled = sample(logits, {settings}, 2);
            EXPECT_EQ(sampled.tokens[0], ops::kNoToken);
            EXPECT_TRUE(std::isnan(sampled.log_probs[0]));
            EXPECT_EQ(sampled.top_tokens[0], ops::kNoToken);
            EXPECT_TRUE(std::isnan(sampled.top_log_probs[0]));
        }
        SampleRow row = settings;
        row.biases = forbidden.biases;
        const SampledRows sampled = sample(plain, {row}, 2);
        EXPECT_EQ(sampled.tokens[0], ops::kNoToken);
        EXPECT_TRUE(std::isnan(sampled.log_probs[0]));
        EXPECT_EQ(sampled.top_tokens, (std::vector<std::uint32_t>{0, 1})); // by the logits
        row.biases.pop_back();
        EXPECT_EQ(sample(plain, {row}).tokens[0], vocabulary - 1) << "the one that is left";
    }
}

TEST_F(OpsSampling, ForbiddenTokensAreNeverDrawn) {
    SampleRow row;
    row.allowed.assign(70, false);
    row.allowed[33] = row.allowed[69] = true;
    std::vector<SampleRow> rows(200, row);
    for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r].seed = r;
        rows[r].top_p = r % 2 == 0 ? 1 : 0.99;
    }
    std::array<int, 2> seen{};
    for (const std::uint32_t token : sample(std::vector<float>(70, 0.0f), rows).tokens) {
        ASSERT_TRUE(token == 33 || token == 69) << token;
        ++seen[token == 33 ? 0 : 1];
    }
    EXPECT_GT(seen[0], 50);
    EXPECT_GT(seen[1], 50);
}

TEST_F(OpsSampling, DrawnTokensTakeThePlacesOfTheirNames) {
    std::vector<std::uint32_t> drawn(150), tokens(300), expected;
    for (std::uint32_t i = 0; i < drawn.size(); ++i)
        drawn[i] = i == 7 ? ops::kNoToken : 1000 + i;
    for (std::uint32_t t = 0; t < tokens.size(); ++t) {
        const std::uint32_t name = t * 7 % 151; // one is beyond those that were drawn
        tokens[t] = t % 3 == 0 ? t : ops::kDrawnBefore + name;
        expected.push_back(t % 3 == 0 || name == 150 ? tokens[t] : drawn[name]);
    }
    const OpTensor from = tensor(DType::U32, {150}, drawn), to = tensor(DType::U32, {300}, tokens);
    run([&](Recording& r) { ops::take_drawn(r, from, to); });
    EXPECT_EQ(read<std::uint32_t>(to), expected);
}

TEST_F(OpsSampling, AnEmptyBatchRecordsNothing) {
    const OpTensor logits = result(DType::F32, {0, 64}), settings = result(DType::U32, {0, 16});
    const OpTensor tokens = result(DType::U32, {0}), log_probs = result(DType::F32, {0});
    Recording recording(device(), QueueRole::Compute, "empty");
    ops::sample(recording,
                {.logits = logits, .settings = settings, .tokens = tokens, .log_probs = log_probs},
                {});
    EXPECT_EQ(recording.num_operations(), 0u);
}

TEST_F(OpsSampling, SaysWhatDoesNotFit) {
    const OpTensor logits = result(DType::F32, {3, 64}), settings = result(DType::U32, {3, 16});
    const OpTensor tokens = result(DType::U32, {3}), log_probs = result(DType::F32, {3});
    const ops::SampleBatch good{
        .logits = logits, .settings = settings, .tokens = tokens, .log_probs = log_probs};
    const Buffer memory = workspace(ops::sample_workspace_bytes(3, 64));
    Recording recording(device(), QueueRole::Compute, "refused");
    const auto refused = [&](const ops::SampleBatch& batch, BufferView space,
                             const std::string& reason) {
        try {
            ops::sample(recording, batch, space);
            ADD_FAILURE() << "not refused: " << reason;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
            EXPECT_NE(error.message().find(reason), std::string::npos) << error.message();
        }
    };
    const auto with = [&](auto change) {
        ops::SampleBatch batch = good;
        change(batch);
        return batch;
    };
    const OpTensor wrong = result(DType::U32, {3, 15}), floats = result(DType::F32, {3, 21});
    const OpTensor ids = result(DType::U32, {3, 21}), few = result(DType::F32, {3, 2});
    refused(with([&](auto& b) { b.settings = wrong; }), memory.view(), "settings is u32 [3, 15]");
    refused(with([&](auto& b) { b.logits = settings; }), memory.view(), "logits is u32");
    refused(with([&](auto& b) { b.tokens = log_probs; }), memory.view(), "tokens is f32");
    refused(with([&](auto& b) { b.log_probs = tokens; }), memory.view(), "log_probs is u32");
    refused(with([&](auto& b) { b.history = wrong; }), memory.view(), "history is u32 [3, 15]");
    refused(with([&](auto& b) { b.biases = tokens; }), memory.view(), "biases is u32 [3]");
    refused(with([&](auto& b) { b.allowed = tokens; }), memory.view(), "wanted is u32 [2]");
    refused(with([&](auto& b) { b.top_tokens = ids; }), memory.view(), "go together");
    refused(with([&](auto& b) {
                b.top_tokens = ids;
                b.top_log_probs = floats;
            }),
            memory.view(), "at most 20 columns");
    refused(with([&](auto& b) {
                b.top_tokens = result(DType::U32, {3, 3}).view;
                b.top_log_probs = few;
            }),
            memory.view(), "top_log_probs is f32 [3, 2]");
    refused(good, memory.view().sub(0, 16), "workspace");
    EXPECT_EQ(recording.num_operations(), 0u);
}

} // namespace
} // namespace bellows
