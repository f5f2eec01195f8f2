// SPDX-License-Identifier: MIT
// `bellows selftest` and the list of devices as somebody with an unknown device runs them.
#include "e2e/runs.hpp"

#include <nlohmann/json.hpp>

#include <set>

using namespace bellows::e2e;

TEST(Selftest, IsGoodHereAndSaysWhatItDid) {
    const Workspace workspace;
    const auto file = workspace.path() / "report.json";
    const Finished finished = workspace.bellows({"selftest", "--json", file.string()});
    ASSERT_EQ(finished.exit_code, 0) << finished.out << finished.errors;
    EXPECT_EQ(finished.errors, "");
    EXPECT_NE(finished.out.find("selftest good"), std::string::npos) << finished.out;
    const auto report = nlohmann::json::parse(bellows::content_of(file));
    EXPECT_EQ(report.at("result"), "good");
    for (const char* key : {"name", "driver", "vulkan"})
        EXPECT_NE(report.at("device").at(key).get<std::string>(), "") << key;
    EXPECT_NE(report.at("mpi").at("library").get<std::string>(), "");
    std::set<std::string> groups;
    for (const auto& row : report.at("rows")) {
        EXPECT_EQ(row.at("result"), "ok") << row;
        EXPECT_GT(row.at("cases").get<int>(), 0) << row;
        EXPECT_LE(row.at("worst_error_over_bound").get<double>(), 1.0) << row;
        groups.insert(row.at("group").get<std::string>());
    }
    EXPECT_EQ(groups, (std::set<std::string>{"codecs", "ops", "exchange", "training"}));
    EXPECT_GE(report.at("rows").size(), 40u);
    EXPECT_NE(finished.out.find("2 ranks"), std::string::npos) << finished.out;
}

TEST(Selftest, AWrongResultIsToldAndGivesOne) {
    const Workspace workspace;
    const Finished finished =
        workspace.bellows({"selftest"}, {{"BELLOWS_SELFTEST_FAULT", "two steps f32, 2 ranks"}});
    EXPECT_EQ(finished.exit_code, 1) << finished.out << finished.errors;
    EXPECT_NE(finished.out.find("selftest WRONG"), std::string::npos) << finished.out;
    EXPECT_NE(finished.out.find("1 wrong"), std::string::npos) << finished.out;
    EXPECT_NE(finished.out.find("WRONG: two steps f32, 2 ranks"), std::string::npos)
        << finished.out;
}

TEST(Selftest, WithoutADeviceGivesThree) {
    const Workspace workspace;
    const Finished finished =
        workspace.bellows({"selftest"}, {{"VK_DRIVER_FILES", "/nonexistent.json"},
                                         {"VK_ICD_FILENAMES", "/nonexistent.json"}});
    expect_one_line(finished, 3, "Vulkan");
}

TEST(Devices, AreListedByEveryCommandThatTakesOne) {
    const Workspace workspace;
    for (const char* command : {"train", "generate", "selftest", "info"}) {
        const Finished finished = workspace.bellows({command, "--device", "list"});
        EXPECT_EQ(finished.exit_code, 0) << command << finished.errors;
        EXPECT_EQ(finished.out.rfind("index", 0), 0u) << finished.out;
        EXPECT_NE(finished.out.find("\n0 "), std::string::npos) << finished.out;
    }
    expect_one_line(workspace.bellows({"info", "--device", "tpu"}), 2, "devices here: 0 (");
    expect_one_line(workspace.bellows({"selftest", "--device", "77"}), 3, "0: ");
}
