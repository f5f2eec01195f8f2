// SPDX-License-Identifier: MIT
// Every op against the f64 reference on all cases of the tables in verify/checks/, in each numeric
// class of the device where it multiplies bf16 matrices; and that a wrong number does not pass.
// With BELLOWS_TEST_DEPTH=quick, cases of `bellows selftest` alone: each kernel, for another
// driver.

#include "support/test_device.hpp"
#include "verify/checks/op_checks.hpp"

#include <bellows/engine/gemm.hpp>

#include <gtest/gtest.h>

#include <cctype>
#include <cstdlib>
#include <ostream>

namespace bellows {

namespace checks {
static void PrintTo(const OpCheck& check, std::ostream* stream) { // what GoogleTest looks for
    *stream << check.what;
}
} // namespace checks

namespace {

using checks::Depth;
using checks::OpCheck;
using checks::Row;
using checks::Verdict;

class OpsTable : public ::testing::TestWithParam<OpCheck> {
protected:
    static void SetUpTestSuite() { device_ = testing::make_device(); }
    static void TearDownTestSuite() { device_.reset(); }
    void TearDown() override { use_gemm_class(*device_, ""); }

    /// The numeric classes that the check is about: all that the device has, or its own alone.
    static std::vector<std::string> classes(const OpCheck& check) {
        std::vector<std::string> names;
        for (const GemmClass& c : gemm_classes(*device_))
            if (c.why_not.empty() && (names.empty() || check.depends_on_gemm_class))
                names.push_back(c.name);
        return names;
    }
    static Row run(const OpCheck& check, const std::string& fault = "") {
        return checks::run_row(check.group, check.what, fault, [&](checks::Check& row) {
            check.body(row, checks::OpRig(*device_));
        });
    }

    inline static std::unique_ptr<Device> device_;
};

TEST_P(OpsTable, MatchesTheReference) {
    for (const std::string& name : classes(GetParam())) {
        use_gemm_class(*device_, name);
        const Row row = run(GetParam());
        EXPECT_EQ(row.verdict, Verdict::Ok) << name << ": " << row.note;
    }
}

std::string test_name(const ::testing::TestParamInfo<OpCheck>& info) {
    std::string name;
    for (const char c : info.param.what)
        if (std::isalnum(static_cast<unsigned char>(c)) != 0)
            name += c;
        else if (!name.empty() && name.back() != '_')
            name += '_';
    return name;
}

Depth asked_depth() {
    const char* depth = std::getenv("BELLOWS_TEST_DEPTH");
    return depth != nullptr && std::string_view(depth) == "quick" ? Depth::Quick : Depth::Full;
}

INSTANTIATE_TEST_SUITE_P(Full, OpsTable, ::testing::ValuesIn(checks::op_checks(asked_depth())),
                         test_name);

class OpsQuickTable : public OpsTable {};

TEST_P(OpsQuickTable, ASpoiltNumberIsWrong) {
    const Row row = run(GetParam(), GetParam().what);
    EXPECT_EQ(row.verdict, Verdict::Wrong);
    EXPECT_GT(row.worst, 1);
    EXPECT_NE(row.note, "");
}

INSTANTIATE_TEST_SUITE_P(Quick, OpsQuickTable, ::testing::ValuesIn(checks::op_checks(Depth::Quick)),
                         test_name);

} // namespace
} // namespace bellows
