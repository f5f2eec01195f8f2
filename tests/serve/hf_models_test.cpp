// SPDX-License-Identifier: MIT
// Folders of others as `generate` opens them and as `train --init` does: transformers' logits and
// likeliest tokens, and the weights of the folder.
#include "support/hf_reference.hpp"
#include "support/small_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/serve/language_model.hpp>
#include <bellows/train/checkpoints.hpp>

#include <algorithm>
#include <cmath>

namespace bellows {
namespace {

using testing::hf_model;
using testing::HfReference;

class HfModel : public ::testing::TestWithParam<std::string> {};

TEST_P(HfModel, GivesTheLogitsOfTransformers) {
    LanguageModelOptions options;
    options.precision = Precision::F32;
    options.seq = 12;
    std::uint64_t last = 0, all = 0;
    options.on_progress = [&](std::uint64_t done, std::uint64_t total) {
        EXPECT_GT(done, last);
        last = done;
        all = total;
    };
    LanguageModel model(testing::test_options(), hf_model(GetParam()), options);
    EXPECT_EQ(last, all);
    const HfReference reference(GetParam());
    const auto tokens = reference.values<std::uint32_t>("tokens");
    const auto logits = reference.values<float>("logits");
    constexpr std::uint64_t kPrompt = 12;
    const std::uint64_t vocabulary = logits.size() / 2 / kPrompt;
    float greatest = 0;
    for (const float logit : logits)
        greatest = std::max(greatest, std::abs(logit));
    for (std::uint64_t line = 0; line < 2; ++line)
        for (std::uint64_t length = 1; length <= kPrompt; ++length) {
            const auto text = std::span(tokens).subspan(line * (kPrompt + 1), length);
            const std::vector<float> next = model.next(text);
            ASSERT_EQ(next.size(), vocabulary);
            const float* const row = logits.data() + (line * kPrompt + length - 1) * vocabulary;
            for (std::uint64_t i = 0; i < vocabulary; ++i)
                ASSERT_NEAR(next[i], row[i], 1e-4 * greatest) << "token " << length;
        }
}

TEST_P(HfModel, WritesTheTokensOfTransformers) {
    LanguageModelOptions options;
    options.precision = Precision::F32;
    options.seq = 144;
    LanguageModel model(testing::test_options(), hf_model(GetParam()), options);
    const HfReference reference(GetParam());
    const auto tokens = reference.values<std::uint32_t>("tokens");
    const auto greedy = reference.values<std::uint32_t>("greedy");
    std::vector<std::uint32_t> text(tokens.begin(), tokens.begin() + 12);
    for (const std::uint32_t token : greedy) {
        const std::vector<float> logits = model.next(text);
        const auto next =
            static_cast<std::uint32_t>(std::ranges::max_element(logits) - logits.begin());
        ASSERT_EQ(next, token) << "after " << text.size();
        text.push_back(next);
    }
}

INSTANTIATE_TEST_SUITE_P(All, HfModel, ::testing::ValuesIn(testing::hf_models()),
                         testing::hf_model_name);

TEST(HfFolder, ComputesInLowerPrecision) {
    for (const Precision precision : {Precision::BF16, Precision::FP8}) {
        LanguageModelOptions options;
        options.precision = precision;
        options.seq = 16;
        LanguageModel model(testing::test_options(), hf_model("v3-fp8"), options);
        const HfReference reference("v3-fp8");
        const auto tokens = reference.values<std::uint32_t>("tokens");
        const auto logits = reference.values<float>("logits");
        const std::vector<float> next = model.next(std::span(tokens).first(12));
        double difference = 0, sum = 0;
        for (std::size_t i = 0; i < next.size(); ++i) {
            const double exact = logits[11 * next.size() + i];
            difference += (next[i] - exact) * (next[i] - exact);
            sum += exact * exact;
        }
        const double bound = precision == Precision::BF16 ? 0.04 : 0.35;
        EXPECT_LT(std::sqrt(difference / sum), bound);
        EXPECT_GT(difference, 0);
    }
}

/// The weights and masters of a run that begins with a folder are the folder's, and so is what the
/// run writes before any step changes them. A run that resumes from that goes on alike.
TEST(HfFolder, GivesARunItsFirstWeights) {
    const HfFolder folder(hf_model("v3-fp8"));
    for (const char* precision : {"f32", "bf16", "fp8"}) {
        SCOPED_TRACE(precision);
        SavedRun options;
        options.config = small_run();
        options.config.model = folder.config().model;
        from_text(options.config.train.precision, precision);
        TemporaryFolder run;
        const auto device = testing::make_device();
        World world = World::single();
        std::uint64_t last = 0, all = 0;
        const auto on_progress = [&](std::uint64_t done, std::uint64_t total) {
            EXPECT_GT(done, last);
            last = done;
            all = total;
        };
        Trainer trainer(*device, world, options.config, options.layout, {},
                        weights_of(folder, world, on_progress));
        EXPECT_EQ(last, all);
        EXPECT_EQ(all, trainer.parameters().num_elements());
        const auto saved = save_checkpoint(
            run.path(), {{kConfigFile, to_toml(options.config.model)}}, trainer, world, 1);
        const Checkpoint checkpoint = Checkpoint::open(saved);
        for (const ParameterInfo& info : parameters(folder.config().model)) {
            std::vector<float> values(info.size());
            folder.read(info, 0, values);
            EXPECT_EQ(read_tensor(checkpoint, "model", info.name, info), values) << info.name;
        }
        Trainer resumed(*device, world, options.config, options.layout);
        load_checkpoint(checkpoint, resumed, world);
        for (std::uint64_t step = 0; step < 3; ++step)
            EXPECT_EQ(trainer.step(step, fill_sequence).loss,
                      resumed.step(step, fill_sequence).loss);
    }
}

TEST(HfFolder, IsReadInsteadOfRandomWeights) {
    RunConfig config = small_run();
    const HfFolder folder(hf_model("llama"));
    config.model = folder.config().model;
    const auto device = testing::make_device();
    World world = World::single();
    const FirstWeights read = weights_of(folder, world);
    bool called = false;
    const Trainer trainer(
        *device, world, config, {}, {},
        [&](ParameterStore& parameters, const ParameterStore::MasterSink& masters) {
            for (const Parameter& parameter : parameters.all())
                EXPECT_NE(parameters.download(parameter.info.name),
                          initial_values(parameter.info, config.train.seed))
                    << parameter.info.name;
            read(parameters, masters);
            called = true;
        });
    EXPECT_TRUE(called);
}

} // namespace
} // namespace bellows
