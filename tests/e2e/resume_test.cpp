// SPDX-License-Identifier: MIT
// A run that stops and is resumed ends with the bits of one that did not stop.
#include "e2e/runs.hpp"

#include <bellows/checkpoint/checkpoint.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <ostream>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

struct Layout {
    const char* name;
    Flags flags;
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
    return out << layout.name;
}

Flags with_steps(Flags flags, const char* steps) {
    flags.insert(flags.end(), {"--steps", steps});
    return flags;
}

class Resume : public testing::TestWithParam<Layout> {
protected:
    Workspace workspace_;
};

} // namespace

TEST_P(Resume, EqualsARunWithoutAStop) {
    const fs::path whole = workspace_.train("whole", with_steps(GetParam().flags, "10"));
    const fs::path parts = workspace_.train("parts", with_steps(GetParam().flags, "5"));
    EXPECT_EQ(steps_of(parts).size(), 5u);
    EXPECT_FALSE(same_tensors(whole, parts)) << "five more steps must change something";
    // Layout, data and configuration come from the checkpoint.
    const Finished resumed =
        workspace_.bellows({"train", "--resume", parts.string(), "--steps", "10"});
    ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
    ASSERT_EQ(steps_of(whole).size(), 10u);
    EXPECT_EQ(printed_steps(parts), printed_steps(whole));
    EXPECT_TRUE(same_tensors(whole, parts));
}

INSTANTIATE_TEST_SUITE_P(
    OfRanks, Resume,
    testing::Values(Layout{"ranks1", {"--ranks", "1"}}, Layout{"dp2_ep2", {"--ranks", "2"}},
                    Layout{"dp2_fp8", {"--ranks", "2", "--precision", "fp8"}},
                    Layout{"pp2", {"--ranks", "2", "--pp", "2", "--micro-batches", "2"}}),
    [](const auto& layout) { return std::string(layout.param.name); });

// The checkpoint says how FP8 products were computed; a variable can say otherwise.
TEST(ResumeOfFp8, KeepsHowProductsAreComputed) {
    const Workspace workspace;
    const Flags one_step = {"--ranks", "2", "--precision", "fp8", "--steps", "1"};
    const auto choice_of = [](const fs::path& run, const char* step) {
        const auto state =
            nlohmann::json::parse(bellows::content_of(run / "checkpoints" / step / "state.json"));
        return state.at("kernels").at("fp8").get<std::string>();
    };
    const fs::path run = workspace.train("run", one_step);
    const std::string usual = choice_of(run, "step-1");
    EXPECT_EQ(usual.rfind("decoded", 0), 0u) << usual;
    constexpr const char* kVariable = "BELLOWS_FP8_VARIANTS";
    EXPECT_EQ(choice_of(workspace.train("decoded", one_step, {{kVariable, "decoded"}}), "step-1"),
              "decoded");
    expect_one_line(
        workspace.bellows(workspace.train_arguments("bad", one_step), {{kVariable, "folded"}}), 3,
        "folded");
    const Flags go_on = {"train", "--resume", run.string(), "--steps", "2"};
    const Finished resumed = workspace.bellows(go_on);
    ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
    EXPECT_EQ(choice_of(run, "step-2"), usual);
}

// Going back in place: the branch that is left stays whole, the new one is the run from now on.
TEST(ResumeFromAnOlderCheckpoint, KeepsTheNewerOnesAside) {
    const Workspace workspace;
    const fs::path run =
        workspace.train("run", {"--ranks", "2", "--steps", "6", "--checkpoint-every", "3"});
    const fs::path checkpoints = run / "checkpoints", whole = workspace.path() / "whole";
    fs::copy(run, whole, fs::copy_options::recursive);
    const Finished resumed =
        workspace.bellows({"train", "--resume", (checkpoints / "step-3").string() + "/", "--lr",
                           "1e-4", "--steps", "5"});
    ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
    const fs::path aside = checkpoints / "step-6.abandoned";
    EXPECT_NE(resumed.out.find("kept as " + aside.string()), std::string::npos) << resumed.out;
    EXPECT_TRUE(same_tensors(aside, whole));
    EXPECT_EQ(bellows::content_of(aside / "metrics.jsonl"),
              bellows::content_of(whole / "metrics.jsonl"));
    EXPECT_TRUE(fs::exists(checkpoints / "step-5")) << "the new work was pruned as the older";
    EXPECT_EQ(steps_of(run).size(), 5u);
    // And on from the run's folder: from step 5, not from what was left.
    const Finished on = workspace.bellows({"train", "--resume", run.string(), "--steps", "6"});
    ASSERT_EQ(on.exit_code, 0) << on.errors;
    EXPECT_FALSE(same_tensors(run, whole)) << "that is the branch of the higher learning rate";
    EXPECT_TRUE(same_tensors(aside, whole));
}

// A damaged checkpoint is named, and the way on from the next older one is offered, and goes.
TEST(ResumeOfADamagedRun, FallsBackToAnOlderCheckpoint) {
    const Workspace workspace;
    const fs::path run =
        workspace.train("run", {"--ranks", "2", "--steps", "6", "--checkpoint-every", "3"});
    const fs::path whole = workspace.path() / "whole", checkpoints = run / "checkpoints";
    fs::copy(run, whole, fs::copy_options::recursive);
    const fs::path file = checkpoints / "step-6" / "optimizer-00002-of-00002.safetensors";
    std::string content = bellows::content_of(file);
    content.back() = static_cast<char>(content.back() ^ 1); // of a moment
    std::ofstream(file, std::ios::binary) << content;
    const Flags resume = {"train", "--resume", run.string(), "--steps", "7"};
    const Finished refused = workspace.bellows(resume);
    expect_one_line(refused, 2, (checkpoints / "step-6").string());
    EXPECT_NE(refused.errors.find("step-3 of this run is whole: add --fall-back"),
              std::string::npos)
        << refused.errors;
    Flags fall_back = resume;
    fall_back.push_back("--fall-back");
    const Finished resumed = workspace.bellows(fall_back);
    ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
    EXPECT_NE(resumed.errors.find("step-6 is damaged"), std::string::npos) << resumed.errors;
    EXPECT_TRUE(fs::exists(checkpoints / "step-6.abandoned"));
    // What it did again has the bits of before.
    const Finished on = workspace.bellows({"train", "--resume", whole.string(), "--steps", "7"});
    ASSERT_EQ(on.exit_code, 0) << on.errors;
    EXPECT_EQ(printed_steps(run), printed_steps(whole));
    EXPECT_TRUE(same_tensors(run, whole));
}

// A learning rate that is far too high: the checkpoints from before outlive --keep-checkpoints.
TEST(ExplodingLoss, IsWarnedAboutAndTheLastGoodCheckpointStays) {
    const Workspace workspace;
    const fs::path good = workspace.train("run", {"--steps", "8"});
    const Finished exploded = workspace.bellows({"train", "--resume", good.string(), "--steps",
                                                 "30", "--lr", "1000", "--checkpoint-every", "1"});
    const std::string step_8 = (good / "checkpoints" / "step-8").string();
    EXPECT_TRUE(exploded.exit_code == 0 || exploded.exit_code == 7) << exploded.exit_code;
    EXPECT_NE(exploded.out.find("warning: the loss explodes: "), std::string::npos) << exploded.out;
    EXPECT_NE(exploded.out.find(" from before is kept"), std::string::npos) << exploded.out;
    const std::vector<fs::path> left = bellows::list_checkpoints(good);
    ASSERT_FALSE(left.empty());
    const auto loss = [](const fs::path& folder) {
        return bellows::Checkpoint::open(folder).state().loss.value_or(1e9);
    };
    EXPECT_LT(loss(left.back()), 8) << left.back();
    EXPECT_GT(loss(left.front()), 8) << "the run did not explode: no test of what it is for";
}

// A checkpoint says nothing about who computes: fewer ranks go on where more stopped.
TEST(ResumeElsewhere, AnotherLayoutGoesOnFromTheSameState) {
    const Workspace workspace;
    const fs::path whole = workspace.train("whole", {"--ranks", "2", "--steps", "7"});
    const fs::path parts = workspace.train("parts", {"--ranks", "2", "--steps", "4"});
    const fs::path other = workspace.path() / "other";
    const Finished resumed =
        workspace.bellows({"train", "--resume", (parts / "checkpoints" / "step-4").string(),
                           "--out", other.string(), "--ranks", "1", "--steps", "7"});
    ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
    const auto expected = steps_of(whole), got = steps_of(other);
    ASSERT_FALSE(got.empty());
    EXPECT_EQ(got.back().step, 7u);
    for (const Step& step : got) {
        const double reference = expected.at(step.step - 1).loss;
        // Rounding alone: f32 sums in another order. Lost moments would show at once.
        EXPECT_LE(std::abs(step.loss - reference), 1e-4 * reference) << step.printed;
    }
}
