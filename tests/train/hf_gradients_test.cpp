// SPDX-License-Identifier: MIT
// One step of training with the weights of folders of others: transformers' loss and its gradients
// of all parameters. Vocabularies of any size.
#include "support/hf_reference.hpp"
#include "support/test_device.hpp"

#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/shape/sharded_ranges.hpp>
#include <bellows/train/checkpoints.hpp>

namespace bellows {
namespace {

/// All models on one device: they have many shaders in common.
class HfGradients : public ::testing::TestWithParam<std::string> {
protected:
    static void SetUpTestSuite() { device_ = testing::make_device(); }
    static void TearDownTestSuite() { device_.reset(); }

    static inline std::unique_ptr<Device> device_;
};

RunConfig run_of(const HfFolder& folder, std::span<const std::uint32_t> text) {
    RunConfig run;
    run.model = folder.config().model;
    run.train.batch = 2;
    run.train.seq = text.size() / run.train.batch - 1;
    run.train.micro_batches = 1;
    run.train.precision = Precision::F32;
    return run;
}

SequenceSource lines_of(std::span<const std::uint32_t> text) {
    return [text](std::uint64_t, std::uint64_t index, std::span<std::uint32_t> line) {
        std::ranges::copy(text.subspan(index * line.size(), line.size()), line.begin());
    };
}

TEST_P(HfGradients, AreThoseOfTransformers) {
    const HfFolder folder(testing::hf_model(GetParam()));
    const testing::HfReference expected(GetParam());
    const auto text = expected.values<std::uint32_t>("tokens");
    const RunConfig run = run_of(folder, text);
    World world = World::single();
    Trainer trainer(*device_, world, run, {}, {}, weights_of(folder, world));
    const StepResult result = trainer.step(0, lines_of(text));
    EXPECT_NEAR(result.loss, expected.floats("loss")[0], 1e-5);
    if (run.model.mtp_depth > 0)
        testing::expect_near(result.mtp_losses, expected.floats("mtp_losses"), "losses of modules");
    trainer.gather(Parted::Gradients);
    for (const Parameter& parameter : trainer.parameters().all()) {
        if (!parameter.info.trainable())
            continue;
        const auto gradient = trainer.parameters().download_gradient(parameter.info.name);
        testing::expect_gradient(expected, run.model, parameter.info,
                                 {gradient.begin(), gradient.end()});
    }
}

INSTANTIATE_TEST_SUITE_P(All, HfGradients, ::testing::ValuesIn(testing::hf_models()),
                         testing::hf_model_name);

/// What stands behind a vocabulary that is no multiple of eight is zero before and after steps.
TEST(OddVocabulary, HasRowsOfZeros) {
    const auto device = testing::make_device();
    for (const char* name : {"odd-vocabulary", "odd-tied"})
        for (const Precision precision : {Precision::F32, Precision::BF16}) {
            SCOPED_TRACE(std::string(name) + " " + to_text(precision));
            const HfFolder folder(testing::hf_model(name));
            const testing::HfReference expected(name);
            const auto text = expected.values<std::uint32_t>("tokens");
            RunConfig run = run_of(folder, text);
            run.train.precision = precision;
            run.train.lr = 1e-2;
            World world = World::single();
            Trainer trainer(*device, world, run, {}, {}, weights_of(folder, world));
            const double first = trainer.step(0, lines_of(text)).loss;
            EXPECT_NEAR(first, expected.floats("loss")[0], 0.02 * first);
            EXPECT_LT(trainer.step(1, lines_of(text)).loss, first);
            trainer.gather(Parted::Masters); // in the gradients' place
            const ParameterStore& parameters = trainer.parameters();
            std::uint64_t found = 0;
            for (const Parameter& parameter : parameters.all()) {
                const std::uint64_t size = parameter.info.size();
                const std::uint64_t padding = stored_elements(parameter.info) - size;
                if (parameter.info.shape[0] != run.model.vocabulary || padding == 0)
                    continue;
                ++found;
                const std::uint64_t begin = parameter.first + size;
                const auto masters = testing::read_back<float>(
                    *device, parameters.flat_gradients().rows(begin, padding).buffer);
                EXPECT_EQ(masters, std::vector<float>(padding, 0.0f));
                if (precision != Precision::BF16)
                    continue;
                const auto read = testing::read_back<std::uint16_t>(
                    *device, parameters.bf16_runs(begin, padding).front().weights.buffer);
                EXPECT_EQ(read, std::vector<std::uint16_t>(padding, 0));
            }
            EXPECT_EQ(found, run.model.tied_embeddings ? 1u : 2u);
        }
}

} // namespace
} // namespace bellows
