// SPDX-License-Identifier: MIT
// Attention and its rotary embedding: shapes that they take in two ways, refusals.

#include "engine/ops/attention_tile.hpp"
#include "support/op_test.hpp"
#include "verify/checks/op_checks.hpp"
#include "verify/reference/ops.hpp"

#include <bellows/engine/attention.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>

namespace bellows {
namespace {

using test::to_double;
using testing::OpTensor;

class OpsAttention : public testing::OpTest {};
class OpsRope : public testing::OpTest {};

TEST_F(OpsAttention, SaysWhatDoesNotFit) {
    const OpTensor q = result(DType::F32, {10, 2, 8}), lse = result(DType::F32, {10, 2});
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(ops::attention_forward(recording, q, q, q, q, lse, {.seq = 3}), Error);
    EXPECT_THROW(ops::attention_forward(recording, q, q, q, lse, lse, {.seq = 5}), Error);
    ops::AttentionOptions documents{.seq = 5};
    documents.documents = lse; // f32
    EXPECT_THROW(ops::attention_forward(recording, q, q, q, q, lse, documents), Error);
    EXPECT_EQ(recording.num_operations(), 0u);
}

TEST_F(OpsAttention, SequencesOfOneDocumentHaveTheBitsOfThoseWithout) {
    constexpr std::uint64_t kTokens = 80, kSeq = 40, kHeads = 2, kSize = 16;
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const auto part = [&](std::uint64_t seed) {
            return tensor(dtype, {kTokens, kHeads, kSize},
                          random(dtype, kTokens * kHeads * kSize, seed));
        };
        const OpTensor q = part(1), k = part(2), v = part(3), d_o = part(4);
        std::vector<std::uint32_t> ends;
        for (std::uint64_t token = 0; token < kTokens; ++token) {
            ends.push_back(0);
            ends.push_back(kSeq);
        }
        const OpTensor documents = tensor(DType::U32, {kTokens, 2}, ends);
        const Buffer scratch = workspace(ops::attention_dgrad_workspace_bytes(kTokens, kHeads));
        std::vector<std::vector<float>> expected;
        for (const bool by_document : {false, true}) {
            ops::AttentionOptions options{.seq = kSeq, .scale = 0.25f};
            if (by_document)
                options.documents = documents;
            const OpTensor lse = result(DType::F32, {kTokens, kHeads});
            std::vector<OpTensor> out;
            for (int i = 0; i < 4; ++i)
                out.push_back(result(dtype, {kTokens, kHeads, kSize}));
            run([&](Recording& recording) {
                ops::attention_forward(recording, q, k, v, out[0], lse, options);
                ops::attention_dgrad(recording, d_o, q, k, v, out[0], lse,
                                     {.dq = out[1].view, .dk = out[2].view, .dv = out[3].view},
                                     options, scratch.view());
            });
            std::vector<std::vector<float>> actual{read(lse)};
            for (const OpTensor& one : out)
                actual.push_back(read(one));
            if (by_document) {
                EXPECT_EQ(actual, expected) << to_string(dtype);
            }
            expected = std::move(actual);
        }
    }
}

/// As on devices whose invocations hold other places of a sum than of A; ops_table_test has them as
/// this device does it, which on CPUs' matrix units is without.
TEST_F(OpsAttention, WeightsMayPassThroughWorkgroupMemory) {
    ops::pass_weights_through_memory(device(), true);
    std::size_t on_units = 0;
    for (const checks::OpCheck& check : checks::op_checks(checks::Depth::Full))
        for (const GemmClass& c : gemm_classes(device())) {
            if (!check.what.starts_with("attention") || !c.why_not.empty() ||
                c.units == GemmClass::Units::None)
                continue;
            use_gemm_class(device(), c.name);
            const checks::Row row =
                checks::run_row(check.group, check.what, "", [&](checks::Check& of) {
                    check.body(of, checks::OpRig(device()));
                });
            EXPECT_EQ(row.verdict, checks::Verdict::Ok) << check.what << ": " << row.note;
            if (device().info().is_cpu) {
                const auto slots = matrix_slots(device(), c.shape, c.units);
                EXPECT_TRUE(slots && slots->like_a);
            }
            ++on_units;
        }
    use_gemm_class(device(), "");
    ops::pass_weights_through_memory(device(), false);
    if (on_units == 0)
        GTEST_SKIP() << "no matrix units";
}

TEST_F(OpsRope, TwoDimensionsAreOneHead) {
    const auto x = random(DType::F32, 6 * 24, 1);
    const OpTensor x_t = tensor(DType::F32, {6, 24}, x);
    const OpTensor y = result(DType::F32, {6, 8});
    const OpTensor table =
        tensor(DType::F32, {3, 4, 2}, ops::rope_table(3, std::vector{1.0, 0.5, 0.1, 0.01}));
    const TensorView part = ops::slice(x_t.view, 1, 16, 8);
    run([&](Recording& recording) { ops::rope_forward(recording, part, table, y, 3); });
    const std::vector<std::int64_t> at{0, 1, 2, 0, 1, 2};
    const auto expected = reference::rope(to_double(x), at,
                                          {.rows = 6,
                                           .heads = 1,
                                           .head_dim = 24,
                                           .offset = 16,
                                           .dim = 8,
                                           .frequencies = {1.0, 0.5, 0.1, 0.01}});
    const auto actual = read(y);
    for (std::size_t i = 0; i < actual.size(); ++i) {
        EXPECT_NEAR(actual[i], expected[i / 8 * 24 + 16 + i % 8], 1e-6);
    }
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(ops::rope_forward(recording, part, table, y, 4), Error) << "3 positions only";
}

} // namespace
} // namespace bellows
