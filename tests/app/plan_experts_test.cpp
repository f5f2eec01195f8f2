// SPDX-License-Identifier: MIT
// `bellows plan experts`: the file of loads, which may hold anything, and what is printed.
#include "app/command_line.hpp"
#include "app/plan/experts.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/expert_tables.hpp>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {
namespace {

constexpr const char* kReadme = R"({"loads": [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]})";

/// Why a file is refused; empty if it is not.
std::string refusal(const std::string& text) {
    try {
        (void)parse_expert_loads(text, "loads.json");
        return "";
    } catch (const Error& error) {
        EXPECT_TRUE(error.code() == ErrorCode::InvalidArgument ||
                    error.code() == ErrorCode::Corrupt);
        EXPECT_TRUE(error.message().starts_with("\"loads.json\"")) << error.message();
        EXPECT_LT(error.message().size(), 400u);
        return error.message();
    }
}

TEST(ExpertLoads, AreReadAsTheyStand) {
    EXPECT_EQ(parse_expert_loads(R"({"loads": [[1, 2.5, 0], [1e3, 0.0, 18446744073709551615]]})",
                                 "loads.json"),
              (ExpertLoads{{1, 2.5, 0}, {1000, 0, 18446744073709551615.0}}));
    EXPECT_EQ(
        parse_expert_loads(R"({"step": 7, "loads": [[3]], "note": {"by": [null]}})", "loads.json"),
        (ExpertLoads{{3}}));
}

TEST(ExpertLoads, AreRefusedWithTheirPlace) {
    const struct {
        const char *text, *part;
    } cases[] = {
        {"", "no sound JSON"},
        {"[[1, 2]]", "no JSON object"},
        {"{}", "has no key \"loads\"; it needs {\"loads\": [[load of each expert] of each layer]}"},
        {R"({"load": [[1]]})", "has no key \"loads\""},
        {R"({"loads": 3})", "loads is number"},
        {R"({"loads": null})", "loads is null"},
        {R"({"loads": {"0": [1]}})", "loads is object"},
        {R"({"loads": []})", "loads is empty"},
        {R"({"loads": [1, 2]})", "loads[0] is number"},
        {R"({"loads": [[1, 2], []]})", "loads[1] is empty"},
        {R"({"loads": [[]]})", "loads[0] is empty"},
        {R"({"loads": [[1, 2], [1, 2, 3]]})", "loads[1] has 3 experts, loads[0] has 2"},
        {R"({"loads": [[1, 2], [1]]})", "loads[1] has 1 experts, loads[0] has 2"},
        {R"({"loads": [[1, 2], [3, -4]]})", "loads[1][1] is -4; a load is a number from 0"},
        {R"({"loads": [[1, -1e-300]]})", "loads[0][1] is -1e-300"},
        {R"({"loads": [[1, "2"]]})", "loads[0][1] is string"},
        {R"({"loads": [[1, true]]})", "loads[0][1] is boolean"},
        {R"({"loads": [[1, null]]})", "loads[0][1] is null"},
        {R"({"loads": [[1, [2]]]})", "loads[0][1] is array"},
        {R"({"loads": [[1, NaN]]})", "no sound JSON"},
        {R"({"loads": [[1, Infinity]]})", "no sound JSON"},
        {R"({"loads": [[1, 1e999]]})", "no sound JSON"},
        {R"({"loads": [[1, 1.1e300]]})", "loads[0][1] is 1.1e+300"},
        {R"({"loads": [[1, 2]], "loads": [[1, 2]]})", "the key \"loads\" twice"},
        {R"({"loads": [[1, 2]})", "no sound JSON"},
        {R"({"loads": [[1, 2]]} trailing)", "no sound JSON"},
    };
    for (const auto& [text, part] : cases)
        EXPECT_NE(refusal(text).find(part), std::string::npos) << text << ": " << refusal(text);
    const std::string deep = "{\"loads\": " + std::string(100000, '[');
    EXPECT_NE(refusal(deep).find("nested"), std::string::npos) << refusal(deep);
}

std::string repeated(const std::string& what, std::size_t times) {
    std::string text = what;
    for (std::size_t i = 1; i < times; ++i)
        text += "," + what;
    return text;
}

TEST(ExpertLoads, HaveBounds) {
    const auto layers = [](std::size_t n) { return "{\"loads\": [" + repeated("[1]", n) + "]}"; };
    EXPECT_EQ(refusal(layers(1024)), "");
    EXPECT_NE(refusal(layers(1025)).find("1025 layers; at most 1024"), std::string::npos);
    const auto experts = [](std::size_t n) { return "{\"loads\": [[" + repeated("1", n) + "]]}"; };
    EXPECT_EQ(refusal(experts(65536)), "");
    EXPECT_NE(refusal(experts(65537)).find("65537 experts; a layer has at most 65536"),
              std::string::npos);
    const std::string largest = "{\"loads\": [[" + repeated("1e300", 65536) + "]]}";
    const ExpertPlanOptions options{parse_expert_loads(largest, "loads.json"),
                                    {.ranks = 16, .replicas = 65536}};
    EXPECT_NE(expert_plan_json(options).find("\"max_over_mean\":[1.0"), std::string::npos);
}

TEST(ExpertPlan, JsonHasTheTableAndItsBalance) {
    const auto plan = nlohmann::json::parse(
        expert_plan_json({parse_expert_loads(kReadme, "x"), {4, 2, 8, 16, false}, true}));
    EXPECT_EQ(plan.size(), 2u);
    EXPECT_EQ(plan.at("physical_to_logical"),
              (std::vector<std::vector<int>>{{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1},
                                             {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}}));
    ASSERT_EQ(plan.at("max_over_mean").size(), 2u);
    EXPECT_NEAR(plan.at("max_over_mean")[0], 1.2081, 5e-5);
    EXPECT_NEAR(plan.at("max_over_mean")[1], 1.2422, 5e-5);
}

TEST(ExpertPlan, TextShowsBeforeAndAfter) {
    ExpertPlanOptions options{parse_expert_loads(kReadme, "x"), {4, 2, 8, 16, false}, false};
    const auto expect = [&](const std::string& part) {
        const std::string text = expert_plan_text(options);
        EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
    };
    expect("12 experts in 16 of 16 slots, 2 on each of 8 ranks; each group on one of 2 nodes\n");
    // Blocks of 2, 2, 2, 2, 1, 1, 1, 1: ranks 0 to 3 have 222, 101, 269, 43; the mean is 129.125.
    expect("\n    0    2.083    1.208   10: 17.7 % x2, 5: 16.0 % x2, 1: 12.8 % x2\n");
    expect("\n    1    2.381    1.242   5: 17.0 % x2, 6: 16.2 % x2, 8: 14.9 % x2\n");
    EXPECT_EQ(expert_plan_text(options).find("--distinct"), std::string::npos);

    options.eplb = {4, 3, 8, 16, false};
    expect("; 3 nodes do not divide 4 groups and make no difference\n");
    expect("in 2 layers (0, 1) a rank has two replicas of one expert");
    expect("--distinct");
    options.eplb.distinct = true;
    EXPECT_EQ(expert_plan_text(options).find("--distinct"), std::string::npos);

    options.eplb = {1, 1, 5, 13, false};
    expect("12 experts in 13 of 15 slots, 3 on each of 5 ranks\n");
    options.eplb = {1, 1, 2, 60, true};
    expect("12 experts in 24 of 60 slots, 30 on each of 2 ranks\n");
    options.loads = {{0, 0, 0}};
    options.eplb = {1, 1, 2, 4, true};
    expect("\n    0        1        1   0: 0.0 % x2, 1: 0.0 % x1, 2: 0.0 % x1\n");
}

TEST(ExpertPlan, IsReadBackAsTables) {
    ExpertPlanOptions options;
    options.loads = {{90, 40, 5, 5, 5}, {5, 5, 5, 40, 90}};
    options.eplb = {1, 1, 2, 8, true};
    const auto tables = parse_expert_tables(expert_plan_json(options), "plan.json");
    ASSERT_EQ(tables.size(), 2u);
    for (std::size_t layer = 0; layer < 2; ++layer)
        EXPECT_EQ(tables[layer],
                  rebalance_experts(options.loads[layer], options.eplb).placement.expert_of_slot);
    const auto refused = [](const std::string& text, const std::string& part) {
        EXPECT_BELLOWS_ERROR(parse_expert_tables(text, "plan.json"), InvalidArgument, part);
    };
    refused("{}", "has no key \"physical_to_logical\"");
    refused(R"({"physical_to_logical": 3})", "physical_to_logical is number");
    refused(R"({"physical_to_logical": [[0], 1]})", "physical_to_logical[1] is number");
    for (const char* expert : {"-2", "65536", "1.5", "18446744073709551615"})
        refused(R"({"physical_to_logical": [[0, )" + std::string(expert) + "]]}",
                "physical_to_logical[0][1] is " + std::string(expert));
}

TEST(ExpertPlan, FlagsAreChecked) {
    const TemporaryFolder folder;
    const PlanExpertsFlags good{.loads = folder.write("loads.json", kReadme),
                                .groups = 4,
                                .nodes = 2,
                                .ranks = 8,
                                .slots = 16,
                                .distinct = true,
                                .json = true};
    const ExpertPlanOptions options = resolve_plan_experts(good);
    EXPECT_EQ(options.loads.size(), 2u);
    EXPECT_EQ(options.eplb.groups, 4u);
    EXPECT_EQ(options.eplb.nodes, 2u);
    EXPECT_EQ(options.eplb.ranks, 8u);
    EXPECT_EQ(options.eplb.replicas, 16u);
    EXPECT_TRUE(options.eplb.distinct && options.json);
    const auto refused = [](const PlanExpertsFlags& flags, const std::string& part) {
        try {
            (void)expert_plan_json(resolve_plan_experts(flags));
            ADD_FAILURE() << "accepted, expected: " << part;
        } catch (const Error& error) {
            EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
        }
    };
    const auto with = [&](auto member, std::uint64_t value) {
        PlanExpertsFlags flags = good;
        flags.*member = value;
        return flags;
    };
    for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{65537}, ~std::uint64_t{0}}) {
        const std::string told = "must be 1 to 65536, not " + std::to_string(value);
        refused(with(&PlanExpertsFlags::groups, value), "--groups " + told);
        refused(with(&PlanExpertsFlags::nodes, value), "--nodes " + told);
        refused(with(&PlanExpertsFlags::ranks, value), "--ranks " + told);
        refused(with(&PlanExpertsFlags::slots, value), "--slots " + told);
    }
    refused(with(&PlanExpertsFlags::slots, 11), "12 experts need at least as many slots, not 11");
    refused(with(&PlanExpertsFlags::ranks, 7), "2 nodes do not divide 7 ranks");
    refused(with(&PlanExpertsFlags::groups, 8), "8 groups do not divide 12 experts");
    PlanExpertsFlags flags = good;
    flags.loads = folder.path() / "none.json";
    refused(flags, "none.json");
    flags.loads = folder.path();
    refused(flags, "not a regular file");
    flags.loads = folder.write("large.json", std::string((16 << 20) + 1, ' '));
    refused(flags, "large.json");
}

} // namespace
} // namespace bellows
