// SPDX-License-Identifier: MIT
// Bad input: exit code 2, one line that says what is wrong, and nothing left behind. No device that
// serves: exit code 3.
#include "e2e/runs.hpp"

#include <memory>
#include <ostream>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

struct BadRun {
    const char* name;
    const char* part;           ///< of the message
    Flags flags;                ///< behind those of a good run
    const char* from = nullptr; ///< of the configuration, replaced by `to`
    const char* to = nullptr;
    const char* data = nullptr; ///< content of the corpus, if another
};

std::ostream& operator<<(std::ostream& out, const BadRun& run) {
    return out << run.name;
}

class Refused : public testing::TestWithParam<BadRun> {};

} // namespace

TEST_P(Refused, WithOneLineAndNothingWritten) {
    const Workspace workspace;
    const BadRun& bad = GetParam();
    Flags arguments = workspace.train_arguments("run", {"--steps", "2"});
    if (bad.from != nullptr)
        arguments.at(2) = workspace.edited_config(bad.from, bad.to).string();
    if (bad.data != nullptr)
        workspace.write("corpus.txt", bad.data);
    arguments.insert(arguments.end(), bad.flags.begin(), bad.flags.end());
    expect_one_line(workspace.bellows(arguments), 2, bad.part);
    EXPECT_FALSE(fs::exists(workspace.path() / "run"));
}

INSTANTIATE_TEST_SUITE_P(
    Input, Refused,
    testing::Values(BadRun{"model_key", "unknown key \"hiden\"", {}, "hidden = 32", "hiden = 32"},
                    BadRun{"train_key", "bacth", {"--ranks", "2"}, "batch = 8", "bacth = 8"},
                    BadRun{"no_toml", "edited.toml", {}, "hidden = 32", "hidden = = 32"},
                    BadRun{
                        "hidden_does_not_divide", "hidden = 33", {}, "hidden = 32", "hidden = 33"},
                    BadRun{"groups_do_not_divide", "n_group = 3", {}, "n_group = 1", "n_group = 3"},
                    BadRun{"missing_data", "does not exist", {"--ranks", "2", "--data", "nowhere"}},
                    BadRun{"empty_data", "no text", {}, nullptr, nullptr, ""},
                    BadRun{"short_data", "4 tokens", {"--ranks", "2"}, nullptr, nullptr, "abc"},
                    BadRun{"pp_does_not_divide", "3 ranks", {"--ranks", "3", "--pp", "2"}},
                    BadRun{"ep_does_not_divide", "ep = 3", {"--ranks", "4", "--ep", "3"}},
                    BadRun{"product", "4 ranks", {"--ranks", "2", "--dp", "2", "--pp", "2"}},
                    BadRun{"more_stages_than_layers", "pp = 4", {"--ranks", "4", "--pp", "4"}},
                    BadRun{"batch_does_not_divide", "multiple of 3", {"--ranks", "3"}},
                    BadRun{"no_ranks", "ranks = 0", {"--ranks", "0"}},
                    BadRun{"unknown_flag", "--frobnicate", {"--frobnicate", "3"}},
                    BadRun{"flag_without_number", "--lr", {"--lr", "fast"}},
                    BadRun{"precision", "f64", {"--precision", "f64"}},
                    BadRun{"device", "devices here: 0 (", {"--device", "frob"}},
                    BadRun{"too_large",
                           "most goes into optimiser",
                           {"--ranks", "2"},
                           "moe_ffn = 32\nrouted_experts = 4",
                           "moe_ffn = 1048576\nrouted_experts = 64"}),
    [](const auto& run) { return std::string(run.param.name); });

TEST(Input, OtherCommandLines) {
    const Workspace workspace;
    expect_one_line(workspace.bellows({}), 2, "subcommand");
    expect_one_line(workspace.bellows({"fly"}), 2, "fly");
    expect_one_line(workspace.bellows({"train"}), 2, "--config");
    expect_one_line(workspace.bellows({"train", "--config", "none.toml"}), 2, "none.toml");
    expect_one_line(
        workspace.bellows({"generate", "--checkpoint", "none", "--prompt", "a", "--tokens", "3"}),
        2, "no checkpoint");
    expect_one_line(workspace.bellows({"info", "--model", "none"}), 2, "none");
}

TEST(Input, NoDeviceIsCodeThree) {
    const Workspace workspace;
    const Environment no_driver = {{"VK_DRIVER_FILES", "/nonexistent.json"}};
    expect_one_line(
        workspace.bellows(workspace.train_arguments("run", {"--steps", "2"}), no_driver), 3,
        "no Vulkan driver");
    EXPECT_FALSE(fs::exists(workspace.path() / "run"));
    const Finished two = workspace.bellows(
        workspace.train_arguments("run", {"--steps", "2", "--ranks", "2"}), no_driver);
    expect_one_line(two, 3, "no Vulkan driver");
    EXPECT_NE(
        two.errors.find("VK_DRIVER_FILES names \"/nonexistent.json\" (there is no such file)"),
        std::string::npos)
        << two.errors;
    EXPECT_FALSE(fs::exists(workspace.path() / "run"));
    // Files that are there, but fit nothing.
    const fs::path rubbish = workspace.write("rubbish.json", "{\"ICD\": 5}");
    const fs::path lost = workspace.write("lost.json", R"({"file_format_version": "1.0.0",
                         "ICD": {"library_path": "./no_driver.so", "api_version": "1.3.0"}})");
    const Finished unfit =
        workspace.bellows(workspace.train_arguments("run", {"--steps", "2"}),
                          {{"VK_DRIVER_FILES", rubbish.string() + ":" + lost.string()}});
    expect_one_line(unfit, 3, "no Vulkan driver");
    EXPECT_NE(unfit.errors.find("it is no driver's manifest"), std::string::npos) << unfit.errors;
    EXPECT_NE(unfit.errors.find("its library does not load: "), std::string::npos) << unfit.errors;
    EXPECT_NE(unfit.errors.find("no_driver.so"), std::string::npos) << unfit.errors;
    // A good configuration, but a device that is not there.
    const Finished seventh =
        workspace.bellows(workspace.train_arguments("run", {"--steps", "2", "--device", "77"}),
                          {{"BELLOWS_DEVICE", "77"}});
    EXPECT_EQ(seventh.exit_code, 3) << seventh.errors;
    EXPECT_NE(seventh.errors.find("\"77\""), std::string::npos) << seventh.errors;
    EXPECT_FALSE(fs::exists(workspace.path() / "run"));
}

namespace {

/// What is done to one file of a good checkpoint.
struct Damage {
    const char* name;
    const char* file; ///< how its name begins
    bool truncate;    ///< to half its size; else the last byte is flipped
    bool generate;    ///< whether `generate` reads it, too
};

std::ostream& operator<<(std::ostream& out, const Damage& damage) {
    return out << damage.name;
}

class DamagedCheckpoint : public testing::TestWithParam<Damage> {
protected:
    static void SetUpTestSuite() {
        workspace_ = std::make_unique<Workspace>();
        good_ = workspace_->train("good", {"--ranks", "2", "--steps", "1"});
    }
    static void TearDownTestSuite() { workspace_.reset(); }

    static std::unique_ptr<Workspace> workspace_;
    static fs::path good_;
};

std::unique_ptr<Workspace> DamagedCheckpoint::workspace_;
fs::path DamagedCheckpoint::good_;

void damage(const fs::path& step, const Damage& how) {
    for (const auto& entry : fs::directory_iterator(step)) {
        if (entry.path().filename().string().rfind(how.file, 0) != 0)
            continue;
        std::string content = bellows::content_of(entry.path());
        if (how.truncate)
            content.resize(content.size() / 2);
        else
            content.at(content.size() - 2) ^= 1;
        std::ofstream(entry.path(), std::ios::binary) << content;
        return;
    }
    FAIL() << "no " << how.file << " in " << step;
}

} // namespace

TEST_P(DamagedCheckpoint, IsRefusedAndLeftAlone) {
    const fs::path run = workspace_->path() / GetParam().name;
    fs::copy(good_, run, fs::copy_options::recursive);
    const fs::path step = run / "checkpoints" / "step-1";
    damage(step, GetParam());
    const auto before = files_below(run);
    for (const char* ranks : {"1", "2"})
        expect_one_line(workspace_->bellows(
                            {"train", "--resume", run.string(), "--steps", "3", "--ranks", ranks}),
                        2, step.string());
    if (GetParam().generate)
        expect_one_line(workspace_->bellows({"generate", "--checkpoint", run.string(), "--prompt",
                                             "the", "--tokens", "1"}),
                        2, step.string());
    EXPECT_EQ(files_below(run), before);
}

INSTANTIATE_TEST_SUITE_P(Of, DamagedCheckpoint,
                         testing::Values(Damage{"model_cut", "model-00001", true, true},
                                         Damage{"model_flipped", "model-00002", false, true},
                                         Damage{"optimizer_cut", "optimizer-00002", true, true},
                                         Damage{"optimizer_flipped", "optimizer-00001", false,
                                                false},
                                         Damage{"config_flipped", "config.toml", false, true},
                                         Damage{"state_cut", "state.json", true, true}),
                         [](const auto& damage) { return std::string(damage.param.name); });
