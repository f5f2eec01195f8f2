// SPDX-License-Identifier: MIT
// The checks themselves: what is wrong must show in the row.
#include "support/test_device.hpp"
#include "verify/checks/check.hpp"
#include "verify/checks/op_rig.hpp"

#include <bellows/base/error.hpp>

#include <gtest/gtest.h>

#include <cmath>

namespace bellows::checks {
namespace {

const std::vector<double> kExpected = {1, 2, 3, 4};

Row row_of(const std::function<void(Check&)>& body, const std::string& fault = "") {
    return run_row("ops", "row", fault, [&](Check& check) {
        check.begin_case("a case");
        body(check);
    });
}

TEST(Check, KeepsTheWorstErrorInUnitsOfItsBound) {
    const Row row = row_of([](Check& check) {
        check.elements("forward", std::vector<float>{1, 2.5f, 3, 4}, kExpected, {4},
                       reference::within(1, 0));
        check.exact("gradient", std::vector<float>{1, 2, 3, 4}, kExpected);
    });
    EXPECT_EQ(row.verdict, Verdict::Ok);
    EXPECT_EQ(row.cases, 1u);
    EXPECT_DOUBLE_EQ(row.worst, 0.5);
    EXPECT_DOUBLE_EQ(row.parts.at("forward"), 0.5);
    EXPECT_EQ(row.parts.at("gradient"), 0);
}

TEST(Check, OneWrongElementShows) {
    const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
    for (const float wrong : {2.11f, -2.0f, nan, infinity}) {
        const Row row = row_of([&](Check& check) {
            check.elements("forward", std::vector<float>{1, wrong, 3, 4}, kExpected, {2, 2},
                           reference::within(0.1, 0));
        });
        EXPECT_EQ(row.verdict, Verdict::Wrong) << wrong;
        EXPECT_GT(row.worst, 1) << wrong;
        EXPECT_NE(row.note.find("a case, forward: 1 of 4 elements are wrong"), std::string::npos);
        EXPECT_NE(row.note.find("[0, 1]"), std::string::npos) << row.note;
    }
}

TEST(Check, EveryKindOfCheckCanFail) {
    const std::vector<std::function<void(Check&)>> wrong = {
        [](Check& c) { c.exact("x", std::vector<float>{1, 2, 3}, kExpected); },
        [](Check& c) { c.exact("x", std::vector<float>{1, 2, 3, 4.0001f}, kExpected); },
        [](Check& c) { c.number("x", 1.1, 1, 0.05); },
        [](Check& c) { c.number("x", std::nan(""), 1, 0.05); },
        [](Check& c) { c.that("x", false, "it does not hold"); },
        [](Check& c) { c.untouched("x", {std::bit_cast<float>(kUntouched), 2}); },
        [](Check&) { throw Error(ErrorCode::DeviceLost, "the device went"); },
        [](Check&) { throw std::runtime_error("anything"); },
    };
    for (std::size_t i = 0; i < wrong.size(); ++i) {
        const Row row = row_of(wrong[i]);
        EXPECT_EQ(row.verdict, Verdict::Wrong) << i;
        EXPECT_NE(row.note, "") << i;
    }
    EXPECT_EQ(run_row("ops", "row", "", [](Check&) {}).verdict, Verdict::Wrong) << "no case";
}

TEST(Check, ASeededFaultShowsInItsRowAlone) {
    const auto body = [](Check& check) {
        check.exact("x", std::vector<float>{1, 2, 3, 4}, kExpected);
    };
    EXPECT_EQ(row_of(body, "row").verdict, Verdict::Wrong);
    EXPECT_EQ(row_of(body, "another row").verdict, Verdict::Ok);
}

TEST(Check, WhatADeviceLacksIsSkippedWithTheReason) {
    const Row lacking =
        row_of([](Check&) { throw Error(ErrorCode::Unsupported, "no such matrices"); });
    EXPECT_EQ(lacking.verdict, Verdict::Skipped);
    EXPECT_EQ(lacking.note, "no such matrices");
}

TEST(OpRig, WhatStandsAroundAResultIsSeen) {
    const auto device = testing::make_device();
    const OpRig rig(*device);
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const OpTensor tensor = rig.head(dtype, {3, 8}, 5);
        rig.write(tensor.view, std::vector<float>(15, 1));
        const auto around = rig.outside(tensor);
        ASSERT_EQ(around.size(), 9u);
        EXPECT_TRUE(std::all_of(around.begin(), around.end(), untouched));
        const auto more = rig.outside(tensor, tensor.view.rows(1, 2));
        ASSERT_EQ(more.size(), 14u);
        EXPECT_EQ(more[0], 1);
        EXPECT_TRUE(untouched(more[5]));
        EXPECT_EQ(rig.read(tensor), std::vector<float>(15, 1));
    }
}

} // namespace
} // namespace bellows::checks
