// SPDX-License-Identifier: MIT
// What a run leaves in --out and on standard output, and the text that a checkpoint writes.
#include "e2e/runs.hpp"

#include <bellows/base/printable.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

/// One run on two ranks that all tests look at.
class Output : public testing::Test {
protected:
    static void SetUpTestSuite() {
        workspace_ = std::make_unique<Workspace>();
        finished_ = workspace_->bellows(
            workspace_->train_arguments("run", {"--ranks", "2", "--steps", "4"}));
        run_ = workspace_->path() / "run";
    }
    static void TearDownTestSuite() { workspace_.reset(); }
    void SetUp() override { ASSERT_EQ(finished_.exit_code, 0) << finished_.errors; }

    static std::string generate(const fs::path& checkpoint, const Flags& flags) {
        Flags arguments = {"generate", "--checkpoint", checkpoint.string(),
                           "--prompt", "the bel",      "--tokens",
                           "40"};
        arguments.insert(arguments.end(), flags.begin(), flags.end());
        const Finished finished = workspace_->bellows(arguments);
        EXPECT_EQ(finished.exit_code, 0) << finished.errors;
        EXPECT_EQ(std::count(finished.errors.begin(), finished.errors.end(), '\n'), 1)
            << finished.errors; // the times
        return finished.out;
    }

    static std::unique_ptr<Workspace> workspace_;
    static Finished finished_;
    static fs::path run_;
};

std::unique_ptr<Workspace> Output::workspace_;
Finished Output::finished_;
fs::path Output::run_;

} // namespace

TEST_F(Output, TheFolderHoldsWhatTheSummaryNames) {
    EXPECT_EQ(finished_.errors, "");
    for (const char* file : {"loss.svg", "experts.svg", "trace.json", "checkpoints/step-4"}) {
        EXPECT_TRUE(fs::exists(run_ / file)) << file;
        EXPECT_NE(finished_.out.find((run_ / file).string()), std::string::npos) << finished_.out;
    }
    EXPECT_NE(finished_.out.find("tokens/s"), std::string::npos) << finished_.out;
    const std::size_t sample = finished_.out.find("sample:");
    ASSERT_NE(sample, std::string::npos) << finished_.out;
    EXPECT_LT(finished_.out.size() - sample, 200u) << "of 8 tokens: " << finished_.out;
    EXPECT_EQ(finished_.out.find("PMIX"), std::string::npos) << finished_.out;
    const std::string picture = bellows::content_of(run_ / "loss.svg");
    EXPECT_EQ(picture.rfind("<svg", 0), 0u);
    EXPECT_NE(picture.find("</svg>"), std::string::npos);
    EXPECT_NE(picture.find("2 ranks"), std::string::npos);
    const std::string experts = bellows::content_of(run_ / "experts.svg");
    for (const char* part : {"2 ranks", ">layer 1<", ">layer 2<", "fullest rank", "</svg>"})
        EXPECT_NE(experts.find(part), std::string::npos) << part;
    // The configuration as run starts the same run again.
    const fs::path again = workspace_->path() / "again";
    const Finished finished =
        workspace_->bellows({"train", "--config", (run_ / "config.toml").string(), "--out",
                             again.string(), "--ranks", "2"});
    ASSERT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_EQ(printed_steps(again), printed_steps(run_));
}

TEST_F(Output, EveryStepHasItsFigures) {
    std::istringstream lines(bellows::content_of(run_ / "metrics.jsonl"));
    std::string line;
    std::uint64_t step = 0;
    while (std::getline(lines, line)) {
        const auto json = nlohmann::json::parse(line);
        EXPECT_EQ(json.at("step").get<std::uint64_t>(), ++step);
        for (const char* key :
             {"loss", "loss_nats_per_token", "loss_nats_per_byte", "grad_norm", "lr",
              "tokens_per_s", "seconds", "model_flops_per_s", "bytes_exchanged"})
            EXPECT_GT(json.at(key).get<double>(), 0.0) << key << " in " << line;
        EXPECT_GT(json.at("seconds_waited").get<double>(), 0.0) << line; // there are two ranks
        const auto& experts = json.at("experts");
        ASSERT_EQ(experts.size(), 2u) << line;
        for (std::size_t i = 0; i < 2; ++i) {
            EXPECT_EQ(experts[i].at("layer"), i + 1);
            const auto loads = experts[i].at("loads").get<std::vector<std::uint64_t>>();
            EXPECT_EQ(loads.size(), 4u);
            EXPECT_EQ(std::accumulate(loads.begin(), loads.end(), std::uint64_t{0}), 8 * 32 * 2)
                << "tokens of the batch, each for two experts";
            EXPECT_GE(experts[i].at("max_over_mean"), 1.0);
            EXPECT_GE(experts[i].at("ranks_max_over_mean"), 1.0);
            EXPECT_GT(experts[i].at("entropy"), 0.0);
        }
    }
    EXPECT_EQ(step, 4u);
}

TEST_F(Output, TheTraceShowsEveryRank) {
    const auto trace = nlohmann::json::parse(bellows::content_of(run_ / "trace.json"));
    std::map<int, std::size_t> work; // by rank
    std::set<std::pair<int, std::string>> named, lanes;
    std::map<int, std::set<std::string>> shown;
    for (const auto& event : trace.at("traceEvents")) {
        const int rank = event.at("pid").get<int>();
        if (event.at("ph") == "M" && event.at("name") == "process_name")
            named.emplace(rank, event.at("args").at("name").get<std::string>());
        if (event.at("ph") == "M" && event.at("name") == "thread_name")
            lanes.emplace(rank, event.at("args").at("name").get<std::string>());
        if (event.at("ph") != "X")
            continue;
        shown[rank].insert(event.at("name").get<std::string>());
        ++work[rank];
        ASSERT_GE(event.at("dur").get<double>(), 0.0) << event;
        ASSERT_GT(event.at("ts").get<double>(), 0.0) << event;
        ASSERT_FALSE(event.at("name").get<std::string>().empty());
    }
    EXPECT_EQ(named, (std::set<std::pair<int, std::string>>{{0, "rank 0"}, {1, "rank 1"}}));
    ASSERT_EQ(work.size(), 2u);
    for (const auto& [rank, events] : work)
        EXPECT_GT(events, 50u) << "rank " << rank;
    // The waits of exchanges and collectives, and the messages, which have a lane per peer.
    for (const int rank : {0, 1}) {
        for (const char* what : {"counts", "records", "parts to sum", "gathering"})
            EXPECT_TRUE(shown[rank].contains(what)) << what << ", rank " << rank;
        for (const std::string owner : {"experts", "gradients"})
            for (const std::string direction : {" messages to ", " messages from "})
                EXPECT_TRUE(lanes.contains({rank, owner + direction + std::to_string(1 - rank)}))
                    << owner << direction << 1 - rank;
    }
}

TEST_F(Output, GenerateFollowsItsSeed) {
    const Flags seed_1 = {"--temperature", "1", "--seed", "1"};
    const std::string text = generate(run_, seed_1);
    EXPECT_EQ(text.rfind("the bel", 0), 0u) << text;
    EXPECT_GT(text.size(), std::string("the bel").size() + 20) << text;
    EXPECT_EQ(generate(run_ / "checkpoints" / "step-4", seed_1), text);
    EXPECT_NE(generate(run_, {"--temperature", "1", "--seed", "2"}), text);
    EXPECT_EQ(generate(run_, {"--temperature", "0", "--seed", "1"}),
              generate(run_, {"--temperature", "0", "--seed", "2"}));
}

// A pipe gets what the model wrote, a terminal nothing that steers it.
TEST_F(Output, TerminalsGetNoControlCharacters) {
    const auto controls = [](const std::string& text) {
        std::size_t found = 0;
        for (const char c : text)
            found += (c >= 0 && c < ' ' && c != '\n' && c != '\t') || c == 0x7f ? 1 : 0;
        return found;
    };
    const Flags arguments = {"generate",   "--checkpoint", run_.string(), "--prompt",
                             "a\x1b[31mb", "--tokens",     "40"};
    const std::string piped = workspace_->bellows(arguments).out;
    EXPECT_NE(piped.find("a\x1b[31mb"), std::string::npos);
    const std::string shown = workspace_->bellows(arguments, {{"BELLOWS_TERMINAL", "80"}}).out;
    EXPECT_NE(shown.find("a\\x1b[31mb"), std::string::npos) << shown;
    EXPECT_EQ(controls(shown), 0u);
    EXPECT_EQ(shown, bellows::printable(piped, "\n\t"));
}

// An untrained model gives all its ids about the same weight: of 40 draws among 1024 ids some would
// be none of the 256 that the tokenizer has.
TEST_F(Output, GenerateWritesWhatTheTokenizerHas) {
    Flags arguments = workspace_->train_arguments("wide", {"--steps", "1"});
    arguments.at(2) = workspace_->edited_config("vocabulary = 256", "vocabulary = 1024").string();
    const Finished finished = workspace_->bellows(arguments);
    ASSERT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_EQ(finished.errors, "") << "train's own sample";
    EXPECT_NE(finished.out.find("sample:"), std::string::npos) << finished.out;
    const std::string text = generate(workspace_->path() / "wide", {"--temperature", "1"});
    EXPECT_GT(text.size(), std::string("the bel").size() + 20) << text;
}

TEST_F(Output, TheLossOnHeldOutTextIsTold) {
    constexpr const char* kLine = "held-out loss ";
    EXPECT_EQ(finished_.out.find(kLine), std::string::npos) << "nothing was held out";
    Flags arguments = workspace_->train_arguments("held-out", {"--ranks", "2", "--steps", "30"});
    arguments.at(2) =
        workspace_->edited_config("sample_tokens = 8", "sample_tokens = 0\nholdout = 0.1").string();
    const Finished finished = workspace_->bellows(arguments);
    ASSERT_EQ(finished.exit_code, 0) << finished.errors;
    const std::size_t at = finished.out.find(kLine);
    ASSERT_NE(at, std::string::npos) << finished.out;
    // Text of the same kind: near the loss of the last step, far from that of the first.
    const double loss = std::stod(finished.out.substr(at + std::string(kLine).size()));
    const auto steps = steps_of(workspace_->path() / "held-out");
    EXPECT_NEAR(loss, steps.back().loss, 0.1 * steps.back().loss);
    EXPECT_LT(loss, 0.8 * steps.front().loss);
    // Too little text for a sequence.
    arguments.at(2) = workspace_->edited_config("lr = 3e-3", "lr = 3e-3\nholdout = 0.001").string();
    expect_one_line(workspace_->bellows(arguments), 2, "20 tokens out of training");
}

TEST_F(Output, HeldOutTextIsLookedAtWhileTraining) {
    const Flags flags = {"--ranks", "2", "--pp", "2", "--steps", "5", "--holdout", "0.1"};
    const fs::path without = workspace_->train("not-looked", flags);
    Flags more = flags;
    more.insert(more.end(), {"--eval-every", "2"});
    const fs::path run = workspace_->train("looked", more);
    EXPECT_EQ(printed_steps(run), printed_steps(without));
    EXPECT_TRUE(same_tensors(run, without));
    std::istringstream lines(bellows::content_of(run / "metrics.jsonl"));
    std::vector<double> losses;
    for (std::string line; std::getline(lines, line);) {
        const auto json = nlohmann::json::parse(line);
        const auto step = json.at("step").get<std::uint64_t>();
        EXPECT_EQ(json.contains("held_out_loss"), step == 2 || step >= 4) << line;
        if (json.contains("held_out_loss"))
            losses.push_back(json.at("held_out_loss").get<double>());
    }
    ASSERT_EQ(losses.size(), 3u);
    EXPECT_LT(losses[2], losses[0]);
    EXPECT_NE(bellows::content_of(run / "loss.svg").find(">held-out text: "), std::string::npos);
    EXPECT_EQ(bellows::content_of(without / "loss.svg").find("held-out"), std::string::npos);
    // The trace is of the steps alone.
    const auto events = [](const fs::path& folder) {
        std::map<std::string, std::size_t> names;
        const auto trace = nlohmann::json::parse(bellows::content_of(folder / "trace.json"));
        for (const auto& event : trace.at("traceEvents"))
            if (event.at("ph") == "X" &&
                event.at("name").get<std::string>().starts_with("loss of "))
                ++names[event.at("name").get<std::string>()];
        return names;
    };
    EXPECT_FALSE(events(without).empty());
    EXPECT_EQ(events(run), events(without));
}

TEST_F(Output, SaysHowManyOfItsWordsAreKnown) {
    EXPECT_NE(finished_.out.find("words stand in the training text"), std::string::npos)
        << finished_.out;
    const Finished finished =
        workspace_->bellows({"generate", "--checkpoint", run_.string(), "--prompt", "the bel",
                             "--tokens", "40", "--data", workspace_->data().string()});
    EXPECT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_NE(finished.errors.find("stand in the given text"), std::string::npos)
        << finished.errors;
    EXPECT_EQ(finished.out.find("stand in"), std::string::npos) << finished.out;
}

TEST_F(Output, NamesItsDevices) {
    const std::size_t at = finished_.out.find("device: ");
    ASSERT_NE(at, std::string::npos) << finished_.out;
    const std::string line = finished_.out.substr(at, finished_.out.find('\n', at) - at);
    EXPECT_NE(line.find(", driver "), std::string::npos) << line;
    EXPECT_TRUE(line.ends_with(": 2 ranks on it") || line.ends_with(": 1 rank on each")) << line;
    const bool on_cpu = line.find(", cpu, ") != std::string::npos;
    constexpr const char* kWarning = "warning: no GPU serves";
    EXPECT_EQ(finished_.out.find(kWarning) != std::string::npos,
              on_cpu && std::getenv("BELLOWS_DEVICE") == nullptr)
        << finished_.out;
    if (!on_cpu)
        return;
    const Flags on_purpose = workspace_->train_arguments("cpu", {"--steps", "1"});
    const auto warned = [&](const Flags& flags, const Environment& environment) {
        Flags arguments = on_purpose;
        arguments.insert(arguments.end(), flags.begin(), flags.end());
        const Finished finished = workspace_->bellows(arguments, environment);
        EXPECT_EQ(finished.exit_code, 0) << finished.errors;
        return finished.out.find(kWarning) != std::string::npos;
    };
    const std::string other = (workspace_->path() / "cpu-2").string();
    EXPECT_FALSE(warned({"--device", "cpu"}, {}));
    EXPECT_FALSE(warned({"--out", other}, {{"BELLOWS_DEVICE", "cpu"}}));
}

TEST_F(Output, SaysWhatItReadAndWhatMemoryItTook) {
    EXPECT_NE(finished_.out.find("text: 1 document, 19."), std::string::npos) << finished_.out;
    EXPECT_NE(finished_.out.find("memory of rank 0, estimated"), std::string::npos)
        << finished_.out;
    EXPECT_NE(finished_.out.find("memory (rank 0) "), std::string::npos) << finished_.out;
}

TEST_F(Output, ShardsAreNumberedByThoseThatExist) {
    EXPECT_TRUE(fs::exists(run_ / "checkpoints/step-4/model-00001-of-00002.safetensors"));
    EXPECT_TRUE(fs::exists(run_ / "checkpoints/step-4/model.safetensors.index.json"));
    // Both ranks hold the same: each writes the part that it updates.
    const fs::path copies =
        workspace_->train("copies", {"--ranks", "2", "--ep", "1", "--steps", "1"});
    EXPECT_TRUE(fs::exists(copies / "checkpoints/step-1/model-00002-of-00002.safetensors"));
    EXPECT_TRUE(fs::exists(copies / "checkpoints/step-1/optimizer-00002-of-00002.safetensors"));
    // Of two stages, two times dp 2 with copies of the experts: so, too.
    const fs::path stages =
        workspace_->train("stages", {"--ranks", "4", "--pp", "2", "--ep", "1", "--steps", "1"});
    EXPECT_TRUE(fs::exists(stages / "checkpoints/step-1/model-00004-of-00004.safetensors"));
    const fs::path alone = workspace_->train("alone", {"--ranks", "1", "--steps", "1"});
    EXPECT_TRUE(fs::exists(alone / "checkpoints/step-1/model.safetensors"));
    EXPECT_TRUE(fs::exists(alone / "checkpoints/step-1/optimizer.safetensors"));
}

TEST_F(Output, UnderMpirunItJoins) {
    Flags command = {mpirun(), "-n", "2", program()};
    const Flags train = workspace_->train_arguments("joined", {"--steps", "4"});
    command.insert(command.end(), train.begin(), train.end());
    const Finished finished = workspace_->run(command, for_mpirun());
    ASSERT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_EQ(printed_steps(workspace_->path() / "joined"), printed_steps(run_));
    EXPECT_TRUE(same_tensors(workspace_->path() / "joined", run_));
}
