// SPDX-License-Identifier: MIT
// One step of training with the weights of folders of others: transformers' loss and its gradients
// of all parameters.
#include "support/hf_reference.hpp"
#include "support/test_device.hpp"

#include <bellows/checkpoint/hf_folder.hpp>
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

TEST_P(HfGradients, AreThoseOfTransformers) {
    const HfFolder folder(testing::hf_model(GetParam()));
    const testing::HfReference expected(GetParam());
    const auto text = expected.values<std::uint32_t>("tokens");
    RunConfig run;
    run.model = folder.config().model;
    run.train.batch = 2;
    run.train.seq = text.size() / run.train.batch - 1;
    run.train.micro_batches = 1;
    run.train.precision = Precision::F32;
    World world = World::single();
    Trainer trainer(*device_, world, run, {}, {}, weights_of(folder, world));
    const StepResult step = trainer.step(0, [&](std::uint64_t, std::uint64_t index,
                                                std::span<std::uint32_t> line) {
        std::ranges::copy(std::span(text).subspan(index * line.size(), line.size()), line.begin());
    });
    EXPECT_NEAR(step.loss, expected.floats("loss")[0], 1e-5);
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

} // namespace
} // namespace bellows
