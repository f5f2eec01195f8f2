// SPDX-License-Identifier: MIT
// The f64 reference with the weights of folders of others: transformers' logits, loss and
// gradients.
#include "support/hf_reference.hpp"
#include "verify/reference/model.hpp"

#include <bellows/checkpoint/hf_folder.hpp>

#include <gtest/gtest.h>

using namespace bellows;
using namespace bellows::testing;

namespace {

class HfModel : public ::testing::TestWithParam<std::string> {};

TEST_P(HfModel, GivesTheLogitsAndGradientsOfTransformers) {
    const HfFolder folder(hf_model(GetParam()));
    const ModelConfig& model = folder.config().model;
    const HfReference expected(GetParam());
    reference::Parameters parameters;
    for (const ParameterInfo& info : bellows::parameters(model)) {
        std::vector<float> values(info.size());
        folder.read(info, 0, values);
        parameters[info.name].assign(values.begin(), values.end());
    }
    const auto text = expected.values<std::int32_t>("tokens");
    reference::Batch batch{.batch = 2, .seq = text.size() / 2 - 1, .tokens = {}, .targets = {}};
    for (std::size_t line = 0; line < batch.batch; ++line)
        for (std::size_t i = 0; i < batch.seq; ++i) {
            batch.tokens.push_back(text[line * (batch.seq + 1) + i]);
            batch.targets.push_back(text[line * (batch.seq + 1) + i + 1]);
        }
    const reference::ModelForward forward = reference::model_forward(model, parameters, batch);
    expect_near(forward.logits, expected.floats("logits"), "logits");
    EXPECT_NEAR(forward.loss, expected.floats("loss")[0], 1e-5);
    const reference::ModelGrads gradients =
        reference::model_backward(model, parameters, batch, forward);
    for (const ParameterInfo& info : bellows::parameters(model))
        if (info.trainable())
            expect_gradient(expected, model, info, gradients.parameters.at(info.name));
}

INSTANTIATE_TEST_SUITE_P(All, HfModel, ::testing::ValuesIn(hf_models()), hf_model_name);

} // namespace
