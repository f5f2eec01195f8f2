// SPDX-License-Identifier: MIT
#pragma once

// What transformers has computed of the folders that make_hf_models.py has made, and the comparison
// of gradients with it. The files hold a gradient of a gain whole, of a matrix its sums over each
// row and over each column.

#include "checkpoint/hf_models.hpp"

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/safetensors.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/parameters.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows::testing {

using Values = std::vector<double>;

/// The file reference.safetensors of a folder.
class HfReference {
public:
    explicit HfReference(const std::string& model)
        : file_(hf_model(model) / "reference.safetensors") {}
    template <class T>
    std::vector<T> values(const std::string& name) const {
        const SafetensorsReader::Tensor* const tensor = file_.find(name);
        if (tensor == nullptr)
            throw Error(ErrorCode::InvalidArgument, file_.path().string() + " lacks " + name);
        std::vector<T> values(tensor->bytes / sizeof(T));
        file_.read(name, std::as_writable_bytes(std::span(values)));
        return values;
    }
    Values floats(const std::string& name) const {
        const std::vector<float> values = this->values<float>(name);
        return {values.begin(), values.end()};
    }

private:
    SafetensorsReader file_;
};

inline double greatest(const Values& values) {
    double found = 0;
    for (const double value : values)
        found = std::max(found, std::abs(value));
    return found;
}

inline void expect_near(const Values& values, const Values& expected, const std::string& what) {
    ASSERT_EQ(values.size(), expected.size()) << what;
    const double bound = 1e-4 * greatest(expected) + 1e-6;
    for (std::size_t i = 0; i < values.size(); ++i)
        ASSERT_NEAR(values[i], expected[i], bound) << what << " at " << i;
}

/// What the folder's own order of a head's rows is: element i with element i + d / 2.
inline std::uint64_t row_there(const ModelConfig& model, const std::string& name,
                               std::uint64_t row) {
    bool rotated = false;
    for (const char* part : {".q_proj.", ".k_proj.", ".q_norm.", ".k_norm."})
        rotated = rotated || name.find(part) != std::string::npos;
    if (model.is_mla() || !rotated)
        return row;
    const std::uint64_t within = row % model.head_dim;
    return row - within + within / 2 + within % 2 * (model.head_dim / 2);
}

/// Sums over the rows and columns of rows [first, first + count) of a gradient.
inline void expect_sums(const HfReference& expected, const std::string& name,
                        const ParameterInfo& info, const Values& gradient, const ModelConfig& model,
                        std::uint64_t first, std::uint64_t count, std::uint64_t expert) {
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

/// gradient: in the rows' order of Bellows.
inline void expect_gradient(const HfReference& expected, const ModelConfig& model,
                            const ParameterInfo& info, const Values& gradient) {
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

/// A folder's name as part of a test's.
inline std::string hf_model_name(const ::testing::TestParamInfo<std::string>& tested) {
    std::string name = tested.param;
    std::ranges::replace(name, '-', '_');
    return name;
}

} // namespace bellows::testing
