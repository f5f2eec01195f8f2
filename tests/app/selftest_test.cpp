// SPDX-License-Identifier: MIT
// Rows of `bellows selftest`: what is wrong must show in the table and on its way as JSON.
#include "app/selftest/rows.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/base/error.hpp>

#include <gtest/gtest.h>

#include <cmath>

namespace bellows::selftest {
namespace {

using checks::Check;

Row row_of(const std::function<void(Check&)>& body) {
    return checks::run_row("ops", "row", "", [&](Check& check) {
        check.begin_case("a case");
        body(check);
    });
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
