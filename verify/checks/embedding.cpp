// SPDX-License-Identifier: MIT
// Both ends of a model: embedding with its gradient, softmax cross-entropy with its gradient.
#include "verify/checks/families.hpp"

#include "verify/reference/ops.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;

struct EmbeddingCase {
    std::uint64_t tokens, vocab, columns;
    std::uint64_t used; ///< ids are drawn from the first so many
    bool f32_table = false;
    Depth depth = Depth::Quick;
};

constexpr auto kEmbeddingCases = std::to_array<EmbeddingCase>({
    {1, 1, 4, 1},
    {257, 256, 20, 256},
    {301, 50, 132, 3},
    {2, 4, 8, 4, false, Depth::Full},
    {13, 7, 12, 7, false, Depth::Full},
    {300, 50, 36, 3, false, Depth::Full},
    {64, 2000, 8, 2000, false, Depth::Full},
    {257, 256, 20, 256, true, Depth::Full},
});

void check_embedding(Check& check, const OpRig& rig, DType dtype, const EmbeddingCase& c) {
    check.begin_case(std::to_string(c.tokens) + " tokens of " + std::to_string(c.vocab));
    const DType table_type = c.f32_table ? DType::F32 : dtype;
    const auto ids = reference::random_indices(c.tokens, 1, c.used);
    const auto table = OpRig::random(table_type, c.vocab * c.columns, 2);
    const auto d_embedded = OpRig::random(dtype, c.tokens * c.columns, 3);
    const OpTensor ids_t = rig.tensor(DType::U32, {c.tokens}, ids);
    const OpTensor table_t = rig.tensor(table_type, {c.vocab, c.columns}, table);
    const OpTensor d_embedded_t = rig.tensor(dtype, {c.tokens, c.columns}, d_embedded);
    const OpTensor embedded = rig.result(dtype, {c.tokens, c.columns});
    const OpTensor d_table = rig.result(DType::F32, {c.vocab, c.columns});
    const OpTensor twice = rig.result(DType::F32, {c.vocab, c.columns});
    const Buffer scratch = rig.workspace(ops::embedding_wgrad_workspace_bytes(c.tokens));
    rig.run([&](Recording& recording) {
        const auto gradient = [&](const OpTensor& to, bool accumulate) {
            ops::embedding_wgrad(recording, ids_t, d_embedded_t, to, accumulate, scratch.view());
        };
        ops::embedding_forward(recording, ids_t, table_t, embedded);
        gradient(d_table, false);
        gradient(twice, false);
        gradient(twice, true);
    });
    auto rows = reference::embedding_forward(to_double(table), ids, c.columns);
    for (double& value : rows)
        if (dtype == DType::BF16)
            value = reference::round_to_bf16(static_cast<float>(value));
    check.exact("forward", rig.read(embedded), rows);
    auto expected =
        reference::embedding_weight_grad(to_double(d_embedded), ids, c.vocab, c.columns);
    const auto terms = static_cast<double>(c.tokens);
    const auto bound = storage_bound(DType::F32, terms, terms);
    check.elements("weight gradient", rig.read(d_table), expected, {c.vocab, c.columns}, bound);
    reference::accumulate(expected, reference::Vector(expected));
    check.elements("weight gradient", rig.read(twice), expected, {c.vocab, c.columns}, bound);
}

struct LossCase {
    std::uint64_t rows, vocab, stride;
    bool in_place = true; ///< the gradient overwrites the logits
    Depth depth = Depth::Quick;
};

constexpr auto kLossCases = std::to_array<LossCase>({
    {1, 1, 4},
    {1, 2, 4},
    {3, 5, 8},
    {3, 6, 8},
    {37, 258, 264},
    {9, 5002, 5004},
    {1, 1, 4, false, Depth::Full},
    {3, 5, 8, false, Depth::Full},
    {100, 256, 256, true, Depth::Full},
    {37, 259, 260, true, Depth::Full},
    {37, 258, 264, false, Depth::Full},
    {9, 5003, 5004, false, Depth::Full},
});

void check_loss(Check& check, const OpRig& rig, DType dtype, const LossCase& c) {
    check.begin_case(by(c.rows, c.vocab));
    constexpr float kScale = 1.0f / 64;
    const auto logits = OpRig::random(dtype, c.rows * c.vocab, 1, -8, 8);
    auto targets = reference::random_indices(c.rows, 2, c.vocab);
    for (std::size_t i = 2; i < targets.size(); i += 5)
        targets[i] = -1;
    const OpTensor logits_t = rig.head(dtype, {c.rows, c.stride}, c.vocab);
    const OpTensor other = rig.head(dtype, {c.rows, c.stride}, c.vocab);
    const OpTensor& d_logits = c.in_place ? logits_t : other;
    rig.write(logits_t.view, logits);
    const OpTensor targets_t = rig.tensor(DType::U32, {c.rows}, targets);
    const OpTensor loss = rig.result(DType::F32, {c.rows});
    const OpTensor alone = rig.result(DType::F32, {c.rows});
    rig.run([&](Recording& recording) {
        ops::cross_entropy(recording, logits_t, targets_t, alone, {}, kScale);
        ops::cross_entropy(recording, logits_t, targets_t, loss, d_logits, kScale);
    });
    const auto expected = reference::cross_entropy(to_double(logits), targets, c.vocab, kScale);
    const auto terms = static_cast<double>(c.vocab);
    // The logarithm of the sum errs by the sum's relative error, the difference by that of 16.
    check.elements("loss", rig.read(loss), expected.losses, {c.rows},
                   reference::within((terms + 40) * reference::kF32Epsilon, 1e-6));
    check.exact("loss without gradient", rig.read(alone), rig.read(loss));
    check.elements("gradient", rig.read(d_logits), expected.dlogits, {c.rows, c.vocab},
                   storage_bound(dtype, terms + 40, kScale));
}

} // namespace

void add_embedding_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "embedding", kEmbeddingCases, check_embedding);
    add_table(checks, depth, "cross entropy", kLossCases, check_loss);
}

} // namespace bellows::checks
