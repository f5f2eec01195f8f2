// SPDX-License-Identifier: MIT
// Embedding and softmax cross-entropy of what they should never see.

#include "support/op_test.hpp"

#include <cmath>

namespace bellows {
namespace {

using testing::OpTensor;

class OpsEmbedding : public testing::OpTest {};
class OpsLoss : public testing::OpTest {};

TEST_F(OpsEmbedding, AnIdOutsideTheVocabularyGivesZerosAndNoGradient) {
    const OpTensor ids = tensor(DType::U32, {3}, std::vector<std::uint32_t>{1, 9, 9});
    const OpTensor table = tensor(DType::F32, {2, 4}, std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
    const OpTensor embedded = result(DType::F32, {3, 4});
    const OpTensor d_table = result(DType::F32, {2, 4});
    const Buffer scratch = workspace(ops::embedding_wgrad_workspace_bytes(3));
    run([&](Recording& recording) {
        ops::embedding_forward(recording, ids, table, embedded);
        ops::embedding_wgrad(recording, ids, embedded, d_table, false, scratch.view());
    });
    EXPECT_EQ(read(embedded), (std::vector<float>{5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0}));
    EXPECT_EQ(read(d_table), (std::vector<float>{0, 0, 0, 0, 5, 6, 7, 8}));
}

TEST_F(OpsLoss, ExtremeLogitsStayFiniteAndWrongTargetsShow) {
    const std::vector<float> logits{1e30f, 0, -1e30f, 5, 1, 2, 3, 4};
    const OpTensor logits_t = tensor(DType::F32, {2, 4}, logits);
    const OpTensor targets = tensor(DType::U32, {2}, std::vector<std::uint32_t>{0, 4});
    const OpTensor loss = result(DType::F32, {2});
    const OpTensor d_logits = result(DType::F32, {2, 4});
    run([&](Recording& recording) {
        ops::cross_entropy(recording, logits_t, targets, loss, d_logits, 1);
    });
    const auto losses = read(loss), gradient = read(d_logits);
    EXPECT_EQ(losses[0], 0);
    for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(gradient[i], 0);
        EXPECT_TRUE(std::isnan(gradient[4 + i]));
    }
    EXPECT_TRUE(std::isnan(losses[1]));
}

} // namespace
} // namespace bellows
