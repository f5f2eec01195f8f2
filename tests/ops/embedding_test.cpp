// SPDX-License-Identifier: MIT
// Embedding and its weight gradient, and softmax cross-entropy with its gradient, against the f64
// reference.

#include "reference/ops.hpp"
#include "support/op_test.hpp"

#include <cmath>

namespace bellows {
namespace {

using test::elements_match;
using test::to_double;
using testing::OpTensor;
using testing::storage_bound;

struct EmbeddingCase {
    std::uint64_t tokens, vocab, columns;
    std::uint64_t used; ///< ids are drawn from the first `used`
    DType table, act;
};

const EmbeddingCase kEmbeddingCases[] = {
    {1, 1, 4, 1, DType::F32, DType::F32},        {13, 7, 12, 7, DType::F32, DType::F32},
    {257, 256, 20, 256, DType::F32, DType::F32}, {300, 50, 36, 3, DType::F32, DType::F32},
    {64, 2000, 8, 2000, DType::F32, DType::F32}, {257, 256, 20, 256, DType::F32, DType::BF16},
    {301, 50, 132, 3, DType::BF16, DType::BF16}, {2, 4, 8, 4, DType::BF16, DType::BF16},
};

class OpsEmbedding : public testing::OpTest, public ::testing::WithParamInterface<EmbeddingCase> {};

TEST_P(OpsEmbedding, MatchesTheReference) {
    const EmbeddingCase c = GetParam();
    const auto ids = test::random_indices(c.tokens, 1, c.used);
    const auto table = random(c.table, c.vocab * c.columns, 2);
    const auto d_embedded = random(c.act, c.tokens * c.columns, 3);
    const OpTensor ids_t = tensor(DType::U32, {c.tokens}, ids);
    const OpTensor table_t = tensor(c.table, {c.vocab, c.columns}, table);
    const OpTensor d_embedded_t = tensor(c.act, {c.tokens, c.columns}, d_embedded);
    const OpTensor embedded = result(c.act, {c.tokens, c.columns});
    const OpTensor d_table = result(DType::F32, {c.vocab, c.columns});
    const Buffer scratch = workspace(ops::embedding_wgrad_workspace_bytes(c.tokens));
    run([&](Recording& recording) {
        ops::embedding_forward(recording, ids_t, table_t, embedded);
        ops::embedding_wgrad(recording, ids_t, d_embedded_t, d_table, false, scratch.view());
    });
    EXPECT_TRUE(elements_match(
        read(embedded), reference::embedding_forward(to_double(table), ids, c.columns),
        {c.tokens, c.columns}, storage_bound(c.act == c.table ? DType::F32 : c.act, 0)));
    auto expected =
        reference::embedding_weight_grad(to_double(d_embedded), ids, c.vocab, c.columns);
    const auto terms = static_cast<double>(c.tokens);
    const auto bound = storage_bound(DType::F32, terms, terms);
    const auto first = read(d_table);
    EXPECT_TRUE(elements_match(first, expected, {c.vocab, c.columns}, bound));
    run([&](Recording& recording) {
        ops::embedding_wgrad(recording, ids_t, d_embedded_t, d_table, true, scratch.view());
    });
    reference::accumulate(expected, reference::Vector(expected));
    EXPECT_TRUE(elements_match(read(d_table), expected, {c.vocab, c.columns}, bound));
}

INSTANTIATE_TEST_SUITE_P(Table, OpsEmbedding, ::testing::ValuesIn(kEmbeddingCases));

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

struct LossCase {
    std::uint64_t rows, vocab, stride;
    DType dtype;
    bool in_place;
};

const LossCase kLossCases[] = {
    {1, 1, 4, DType::F32, false},       {3, 5, 8, DType::F32, false},
    {100, 256, 256, DType::F32, true},  {37, 259, 260, DType::F32, true},
    {9, 5003, 5004, DType::F32, false}, {100, 256, 256, DType::BF16, true},
    {37, 258, 264, DType::BF16, false},
};

class OpsLoss : public testing::OpTest, public ::testing::WithParamInterface<LossCase> {};

TEST_P(OpsLoss, MatchesTheReference) {
    const LossCase c = GetParam();
    const float scale = 1.0f / 64;
    const auto logits = random(c.dtype, c.rows * c.vocab, 1, -8, 8);
    auto targets = test::random_indices(c.rows, 2, c.vocab);
    for (std::size_t i = 2; i < targets.size(); i += 5) {
        targets[i] = -1;
    }
    const OpTensor whole = result(c.dtype, {c.rows, c.stride});
    const OpTensor other = result(c.dtype, {c.rows, c.stride});
    const TensorView logits_t = ops::slice(whole.view, 1, 0, c.vocab);
    const TensorView d_logits = c.in_place ? logits_t : ops::slice(other.view, 1, 0, c.vocab);
    write(logits_t, logits);
    const OpTensor targets_t = tensor(DType::U32, {c.rows}, targets);
    const OpTensor loss = result(DType::F32, {c.rows});
    const OpTensor loss_only = result(DType::F32, {c.rows});
    run([&](Recording& recording) {
        ops::cross_entropy(recording, logits_t, targets_t, loss_only, {}, scale);
        ops::cross_entropy(recording, logits_t, targets_t, loss, d_logits, scale);
    });
    const auto expected = reference::cross_entropy(to_double(logits), targets, c.vocab, scale);
    const auto terms = static_cast<double>(c.vocab);
    EXPECT_EQ(read(loss), read(loss_only));
    // The logarithm of the sum errs by the sum's relative error, the difference by that of 16.
    EXPECT_TRUE(elements_match(read(loss), expected.losses, {c.rows},
                               test::within((terms + 40) * test::kF32Epsilon, 1e-6)));
    EXPECT_TRUE(elements_match(read(d_logits), expected.dlogits, {c.rows, c.vocab},
                               storage_bound(c.dtype, terms + 40, scale)));
}

INSTANTIATE_TEST_SUITE_P(Table, OpsLoss, ::testing::ValuesIn(kLossCases));

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
