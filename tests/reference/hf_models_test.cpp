// SPDX-License-Identifier: MIT
// The f64 reference with the weights of folders of others: transformers' logits, loss and
// gradients.
#include "checkpoint/hf_models.hpp"
#include "verify/reference/model.hpp"

#include <bellows/checkpoint/hf_folder.hpp>

#include <gtest/gtest.h>

#include <cmath>

using namespace bellows;
using bellows::testing::hf_model;

namespace {

using Values = std::vector<double>;

/// reference.safetensors.
class Expected {
public:
    explicit Expected(const std::string& model)
        : file_(hf_model(model) / "reference.safetensors") {}
    bool has(const std::string& name) const { return file_.find(name) != nullptr; }
    Values floats(const std::string& name) const {
        std::vector<float> values(file_.find(name)->bytes / sizeof(float));
        file_.read(name, std::as_writable_bytes(std::span(values)));
        return {values.begin(), values.end()};
    }
    std::vector<std::int32_t> ids(const std::string& name) const {
        std::vector<std::int32_t> values(file_.find(name)->bytes / sizeof(std::int32_t));
        file_.read(name, std::as_writable_bytes(std::span(values)));
        return values;
    }

private:
    SafetensorsReader file_;
};

double greatest(const Values& values) {
    double found = 0;
    for (const double value : values)
        found = std::max(found, std::abs(value));
    return found;
}

void expect_near(const Values& values, const Values& expected, const std::string& what) {
    ASSERT_EQ(values.size(), expected.size()) << what;
    const double bound = 1e-4 * greatest(expected) + 1e-6;
    for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_NEAR(values[i], expected[i], bound) << what << " at " << i;
}

/// What the folder's own order of a head's rows is: element i with element i + d / 2.
std::uint64_t row_there(const ModelConfig& model, const std::string& name, std::uint64_t row) {
    bool rotated = false;
    for (const char* part : {".q_proj.", ".k_proj.", ".q_norm.", ".k_norm."})
        rotated = rotated || name.find(part) != std::string::npos;
    if (model.is_mla() || !rotated)
        return row;
    const std::uint64_t within = row % model.head_dim;
    return row - within + within / 2 + within % 2 * (model.head_dim / 2);
}

/// Sums over the rows and columns of rows [first, first + count) of a gradient.
void expect_sums(const Expected& expected, const std::string& name, const ParameterInfo& info,
                 const reference::Vector& gradient, const ModelConfig& model, std::uint64_t first,
                 std::uint64_t count, std::uint64_t expert) {
    const std::uint64_t columns = info.shape[1];
    Values rows(count, 0), sums(columns, 0);
    for (std::uint64_t row = 0; row < count; ++row)
        for (std::uint64_t column = 0; column < columns; ++column) {
            const double value = gradient[(first + row) * columns + column];
            rows[row_there(model, info.name, row)] += value;
            sums[column] += value;
        }
    const auto part = [&](const char* kind, std::size_t size) {
        const Values all = expected.floats(kind + name);
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(expert * size);
        return Values(begin, begin + static_cast<std::ptrdiff_t>(size));
    };
    expect_near(rows, part("rows.", rows.size()), "rows of " + info.name);
    expect_near(sums, part("columns.", sums.size()), "columns of " + info.name);
}

void expect_gradient(const Expected& expected, const ModelConfig& model, const ParameterInfo& info,
                     const reference::Vector& gradient) {
    if (info.shape.size() == 1) {
        Values there(gradient.size());
        for (std::uint64_t i = 0; i < gradient.size(); ++i)
            there[row_there(model, info.name, i)] = gradient[i];
        return expect_near(there, expected.floats("gradient." + info.name), info.name);
    }
    std::string name = info.name;
    const std::uint64_t rows = info.shape[0];
    const std::size_t fused = name.find("gate_up_proj");
    if (info.expert >= 0) {
        name = "model.layers." + std::to_string(info.layer) + ".mlp.experts." +
               (fused == std::string::npos ? "down_proj" : "gate_up_proj");
        return expect_sums(expected, name, info, gradient, model, 0, rows,
                           static_cast<std::uint64_t>(info.expert));
    }
    if (fused == std::string::npos)
        return expect_sums(expected, name, info, gradient, model, 0, rows, 0);
    for (const bool up : {false, true})
        expect_sums(expected, std::string(name).replace(fused, 12, up ? "up_proj" : "gate_proj"),
                    info, gradient, model, up ? rows / 2 : 0, rows / 2, 0);
}

class HfModel : public ::testing::TestWithParam<std::string> {};

TEST_P(HfModel, GivesTheLogitsAndGradientsOfTransformers) {
    const HfFolder folder(hf_model(GetParam()));
    const ModelConfig& model = folder.config().model;
    const Expected expected(GetParam());
    reference::Parameters parameters;
    for (const ParameterInfo& info : bellows::parameters(model)) {
        std::vector<float> values(info.size());
        folder.read(info, 0, values);
        parameters[info.name].assign(values.begin(), values.end());
    }
    const std::vector<std::int32_t> text = expected.ids("tokens");
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

INSTANTIATE_TEST_SUITE_P(All, HfModel, ::testing::ValuesIn(bellows::testing::hf_models()),
                         [](const auto& tested) {
                             std::string name = tested.param;
                             std::ranges::replace(name, '-', '_');
                             return name;
                         });

} // namespace
