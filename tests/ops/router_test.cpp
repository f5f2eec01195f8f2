// SPDX-License-Identifier: MIT
// The router's rules that show in single tokens: ties, NaN, absent experts; refusals.

#include "support/op_test.hpp"

#include <cmath>

namespace bellows {
namespace {

using testing::OpTensor;

class OpsRouterRules : public testing::OpTest {};

TEST_F(OpsRouterRules, TiesGoToTheLowerExpertAndNanIsNeverPreferred) {
    const float nan = std::nanf("");
    const OpTensor logits = tensor(DType::F32, {3, 6},
                                   std::vector<float>{1, 2, 2, 2, 1, 2, //
                                                      0, 0, 0, 0, 0, 0, //
                                                      nan, 1, nan, 0, nan, 2});
    const OpTensor scores = result(DType::F32, {3, 6});
    const OpTensor ids = result(DType::I32, {3, 4});
    const OpTensor weights = result(DType::F32, {3, 4});
    run([&](Recording& recording) {
        ops::router_forward(recording, logits, {}, scores, ids, weights, {.normalise = false});
    });
    EXPECT_EQ(read<int>(ids), (std::vector<int>{1, 2, 3, 5, 0, 1, 2, 3, 5, 1, 3, 0}));
}

TEST_F(OpsRouterRules, CountsAddUpAndIgnoreAbsentExperts) {
    const std::vector<std::int32_t> ids{0, 2, -1, 2, 7, 2, 1, -1, 0, 100};
    const OpTensor ids_t = tensor(DType::I32, {5, 2}, ids);
    const OpTensor counts = result(DType::U32, {8});
    run([&](Recording& recording) {
        ops::expert_counts(recording, ids_t, counts, false);
        ops::expert_counts(recording, ids_t, counts, true);
    });
    EXPECT_EQ(read<int>(counts), (std::vector<int>{4, 2, 6, 0, 0, 0, 0, 2}));
}

TEST_F(OpsRouterRules, SaysWhatDoesNotFit) {
    const OpTensor logits = result(DType::F32, {3, 6});
    const OpTensor ids = result(DType::I32, {3, 7});
    const OpTensor weights = result(DType::F32, {3, 7});
    Recording recording(device(), QueueRole::Compute, "refused");
    try {
        ops::router_forward(recording, logits, {}, logits, ids, weights, {});
        FAIL() << "7 of 6 experts";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find("top_k is 7 of 6"), std::string::npos) << error.message();
    }
    const OpTensor one = result(DType::I32, {3, 1});
    EXPECT_THROW(ops::expert_counts(recording, one, result(DType::U32, {2, 6}), true), Error)
        << "3 tokens in 2 sequences";
    EXPECT_THROW(ops::router_dgrad(recording, result(DType::F32, {3, 1}), one, logits, logits, {},
                                   {result(DType::U32, {3, 5}), 1}),
                 Error)
        << "5 counts of 6 experts";
    EXPECT_EQ(recording.num_operations(), 0u);
}

} // namespace
} // namespace bellows
