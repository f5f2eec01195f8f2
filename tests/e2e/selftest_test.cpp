// SPDX-License-Identifier: MIT
// `bellows selftest` and the list of devices as somebody with an unknown device runs them.
#include "e2e/runs.hpp"

#include <nlohmann/json.hpp>

#include <set>

using namespace bellows::e2e;

// All of the command, once: every row is good but the one that has a fault put into it.
TEST(Selftest, SaysWhatItDidAndGivesOneForAWrongResult) {
    constexpr const char* kFault = "two steps f32, 2 ranks";
    const Workspace workspace;
    const auto file = workspace.path() / "report.json";
    // On a machine that never ran these shaders, compiling them takes the most of it.
    const Finished finished =
        workspace.start({"selftest", "--json", file.string()}, {{"BELLOWS_SELFTEST_FAULT", kFault}})
            .wait(std::chrono::seconds(400));
    ASSERT_EQ(finished.exit_code, 1) << finished.out << finished.errors;
    EXPECT_EQ(finished.errors, "");
    EXPECT_NE(finished.out.find("selftest WRONG"), std::string::npos) << finished.out;
    EXPECT_NE(finished.out.find("1 wrong"), std::string::npos) << finished.out;
    EXPECT_NE(finished.out.find("WRONG: " + std::string(kFault)), std::string::npos)
        << finished.out;
    const auto report = nlohmann::json::parse(bellows::content_of(file));
    EXPECT_EQ(report.at("result"), "wrong");
    for (const char* key : {"name", "driver", "vulkan"})
        EXPECT_NE(report.at("device").at(key).get<std::string>(), "") << key;
    EXPECT_NE(report.at("mpi").at("library").get<std::string>(), "");
    std::set<std::string> groups;
    for (const auto& row : report.at("rows")) {
        groups.insert(row.at("group").get<std::string>());
        if (row.at("result") == "WRONG") // one, says the output
            continue;
        EXPECT_EQ(row.at("result"), "ok") << row;
        EXPECT_GT(row.at("cases").get<int>(), 0) << row;
        EXPECT_LE(row.at("worst_error_over_bound").get<double>(), 1.0) << row;
    }
    EXPECT_EQ(groups, (std::set<std::string>{"codecs", "ops", "fp8", "exchange", "training"}));
    EXPECT_GE(report.at("rows").size(), 50u);
    EXPECT_FALSE(report.at("not_covered").empty());
    EXPECT_NE(finished.out.find("not covered on this device:\n"), std::string::npos);
    for (const auto& left_out : report.at("not_covered"))
        EXPECT_NE(finished.out.find(left_out.get<std::string>()), std::string::npos) << left_out;
    EXPECT_NE(finished.out.find("2 ranks"), std::string::npos) << finished.out;
}

// What ranks that are started by hand do among themselves, without a fault.
TEST(Selftest, IsGoodAmongRanksOfMpirun) {
    const Workspace workspace;
    const auto file = workspace.path() / "report.json";
    const Finished finished = workspace.run(
        {mpirun(), "-n", "2", program(), "selftest", "--json", file.string()}, for_mpirun());
    ASSERT_EQ(finished.exit_code, 0) << finished.out << finished.errors;
    EXPECT_NE(finished.out.find("selftest good"), std::string::npos) << finished.out;
    const auto report = nlohmann::json::parse(bellows::content_of(file));
    EXPECT_EQ(report.at("result"), "good");
    EXPECT_FALSE(report.at("rows").empty());
    for (const auto& row : report.at("rows"))
        EXPECT_EQ(row.at("result"), "ok") << row;
}

TEST(Selftest, WithoutADeviceGivesThree) {
    const Workspace workspace;
    const Finished finished =
        workspace.bellows({"selftest"}, {{"VK_DRIVER_FILES", "/nonexistent.json"},
                                         {"VK_ICD_FILENAMES", "/nonexistent.json"}});
    expect_one_line(finished, 3, "Vulkan");
}

/// Mesa 26 overruns its stack with vectors of 512 bits: a device that is refused, not a crash.
TEST(Selftest, ADriverThatWouldCrashIsRefused) {
    const Workspace workspace;
    const std::map<std::string, std::string> wide = {{"LP_NATIVE_VECTOR_WIDTH", "512"}};
    const Finished listed = workspace.bellows({"info", "--json"}, wide);
    const auto device = nlohmann::json::parse(listed.out).at("devices").at(0);
    if (device.at("driver").get<std::string>().find("Mesa 22") != std::string::npos) {
        EXPECT_EQ(listed.exit_code, 0) << listed.errors;
        EXPECT_TRUE(device.at("lacks").empty()) << device;
        return;
    }
    EXPECT_EQ(listed.exit_code, 3) << listed.errors;
    EXPECT_EQ(device.at("lacks").size(), 1u) << device;
    const Finished finished = workspace.bellows({"selftest"}, wide);
    EXPECT_EQ(finished.exit_code, 3) << finished.out << finished.errors;
    EXPECT_NE(finished.errors.find("LP_NATIVE_VECTOR_WIDTH=256"), std::string::npos)
        << finished.errors;
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
