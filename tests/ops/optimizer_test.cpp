// SPDX-License-Identifier: MIT
// Sums of many elements: pairs of f32 keep what one of them loses.

#include "support/op_test.hpp"

namespace bellows {
namespace {

using testing::OpTensor;

class OpsOptimizer : public testing::OpTest {};

TEST_F(OpsOptimizer, PairsKeepWhatOneFloatLoses) {
    // 2^24 large values whose f32 sum would stand still, and terms that cancel.
    std::vector<float> values(2'000'003, 1.0f);
    values[0] = 1e9f;
    values[1'000'000] = 0x1p-20f;
    values[1'999'999] = -1e9f;
    const OpTensor values_t = tensor(DType::F32, {values.size()}, values);
    const OpTensor sum = result(DType::F32, {2});
    const Buffer scratch = workspace(ops::sum_pairs_workspace_bytes(values.size()));
    run([&](Recording& recording) { ops::sum_pairs(recording, values_t, sum, scratch.view()); });
    double expected = 0;
    for (const float value : values) {
        expected += value;
    }
    const auto pair = read(sum);
    EXPECT_NEAR(static_cast<double>(pair[0]) + pair[1], expected, 1e-6);
    EXPECT_EQ(pair[0], static_cast<float>(expected));
}

} // namespace
} // namespace bellows
