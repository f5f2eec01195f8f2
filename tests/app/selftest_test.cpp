// SPDX-License-Identifier: MIT
// The checks of `bellows selftest` themselves: what is wrong must show, in the row, in the table
// and on its way as JSON.
#include "app/selftest/rows.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/engine/error.hpp>

#include <gtest/gtest.h>

#include <cmath>

namespace bellows::selftest {
namespace {

const std::vector<double> kExpected = {1, 2, 3, 4};

Row row_of(const std::function<void(Check&)>& body, const std::string& fault = "") {
    return run_row("ops", "row", fault, [&](Check& check) {
        check.begin_case("a case");
        body(check);
    });
}

TEST(SelftestCheck, KeepsTheWorstErrorInUnitsOfItsBound) {
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

TEST(SelftestCheck, OneWrongElementShows) {
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

TEST(SelftestCheck, EveryKindOfCheckCanFail) {
    const std::vector<std::function<void(Check&)>> wrong = {
        [](Check& c) { c.exact("x", std::vector<float>{1, 2, 3}, kExpected); },
        [](Check& c) { c.exact("x", std::vector<float>{1, 2, 3, 4.0001f}, kExpected); },
        [](Check& c) { c.number("x", 1.1, 1, 0.05); },
        [](Check& c) { c.number("x", std::nan(""), 1, 0.05); },
        [](Check& c) { c.that("x", false, "it does not hold"); },
        [](Check& c) { c.untouched_from("x", {1, 2}, 1); },
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

TEST(SelftestCheck, ASeededFaultShowsInItsRowAlone) {
    const auto body = [](Check& check) {
        check.exact("x", std::vector<float>{1, 2, 3, 4}, kExpected);
    };
    EXPECT_EQ(row_of(body, "row").verdict, Verdict::Wrong);
    EXPECT_EQ(row_of(body, "another row").verdict, Verdict::Ok);
}

TEST(SelftestCheck, WhatADeviceLacksIsSkippedWithTheReason) {
    const Row lacking =
        row_of([](Check&) { throw Error(ErrorCode::Unsupported, "no such matrices"); });
    EXPECT_EQ(lacking.verdict, Verdict::Skipped);
    EXPECT_EQ(lacking.note, "no such matrices");
}

TEST(SelftestRows, SurviveTheWayAsJson) {
    Row row = row_of([](Check& c) { c.number("x", std::nan(""), 1, 0.05); });
    row.seconds = 1.5;
    const std::vector<Row> rows =
        rows_from_json(rows_to_json({row, row_of([](Check& c) { c.that("x", true, ""); })}));
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0].verdict, Verdict::Wrong);
    EXPECT_EQ(rows[0].note, row.note);
    EXPECT_TRUE(std::isinf(rows[0].worst));
    EXPECT_TRUE(std::isinf(rows[0].parts.at("x")));
    EXPECT_EQ(rows[0].seconds, 1.5);
    EXPECT_EQ(rows[1].verdict, Verdict::Ok);
    EXPECT_THROW(rows_from_json("[{}]"), Error);
    EXPECT_THROW(rows_from_json("not json"), Error);
}

TEST(SelftestRows, TheTableSaysWhatIsWrong) {
    std::FILE* file = std::tmpfile();
    Table table(file);
    table.add(row_of([](Check& c) { c.that("x", true, ""); }));
    EXPECT_TRUE(table.good());
    table.add(row_of([](Check& c) { c.number("x", 3, 1, 0.5); }));
    EXPECT_FALSE(table.good());
    table.finish();
    std::rewind(file);
    std::string text(4096, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
    EXPECT_NE(text.find("WRONG: row: a case, x: 1 of 1 elements are wrong"), std::string::npos)
        << text;
    EXPECT_NE(text.find("4.000"), std::string::npos) << text;
}

} // namespace
} // namespace bellows::selftest
