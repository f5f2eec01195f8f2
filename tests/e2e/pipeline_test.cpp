// SPDX-License-Identifier: MIT
// Every schedule gives the bits of the same micro-batches one after another on one rank; DualPipe,
// which has two copies of the parameters, those of two halves summed.
#include "e2e/runs.hpp"

#include <algorithm>
#include <memory>
#include <utility>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

class Pipelines : public testing::TestWithParam<const char*> {
protected:
    static void SetUpTestSuite() {
        workspace_ = std::make_unique<Workspace>();
        // Five layers for two or four stages, which makes them uneven; the norm of the gradient is
        // a sum over ranks, whose rounding must not come back through clipping.
        std::string config = bellows::content_of(workspace_->config());
        for (const auto& [from, to] : {std::pair("\nlayers = 3\n", "\nlayers = 5\n"),
                                       {"warmup_steps = 4\n", "clip_norm = 0.0\n"}}) {
            const std::size_t at = config.find(from);
            ASSERT_NE(at, std::string::npos) << from;
            config.replace(at, std::string(from).size(), to);
        }
        workspace_->write("small.toml", config);
        one_rank_ = run("one-rank", {"--ranks", "1", "--micro-batches", "4"});
        halves_ = run("halves", {"--ranks", "2", "--dp", "2", "--ep", "1", "--micro-batches", "2"});
    }
    static void TearDownTestSuite() { workspace_.reset(); }

    static fs::path run(const std::string& name, Flags flags) {
        flags.insert(flags.end(), {"--steps", "3", "--checkpoint-every", "2"});
        return workspace_->train(name, flags);
    }
    static Flags pipeline(const std::string& kind) {
        return {"--ranks", "2", "--pp", "2", "--micro-batches", "4", "--pipeline", kind};
    }

    static Flags pairs(const std::string& mode) {
        return {"--ranks", "2",          "--ep",      "2",       "--micro-batches",
                "2",       "--pipeline", "dualpipev", "--pairs", mode};
    }

    /// The end of a run says how its pipeline went.
    static void expect_a_report(const std::string& out) {
        for (const char* part :
             {"pipeline, last step measured ", "bubble by rank ", "stalled ",
              "of it under other work\n", "chunks of at most ", "pipeline picture "})
            EXPECT_NE(out.find(part), std::string::npos) << part << out;
        EXPECT_EQ(out.find("measured 0 ms"), std::string::npos) << out;
        // The pattern is one that the other command takes, of all of a layer's nodes.
        const std::string before = "    pairs            ";
        const std::size_t at = out.find(before);
        ASSERT_NE(at, std::string::npos) << out;
        const std::size_t end = out.find('\n', at);
        const std::string pattern = out.substr(at + before.size(), end - at - before.size());
        EXPECT_EQ(std::count(pattern.begin(), pattern.end(), '('), 15) << pattern;
        EXPECT_EQ(workspace_->bellows({"schedule", "--pair", "--order", pattern}).exit_code, 0);
    }

    static std::unique_ptr<Workspace> workspace_;
    static fs::path one_rank_, halves_;
};

std::unique_ptr<Workspace> Pipelines::workspace_;
fs::path Pipelines::one_rank_, Pipelines::halves_;

std::vector<double> losses_of(const fs::path& run) {
    std::vector<double> losses;
    for (const Step& step : steps_of(run))
        losses.push_back(step.loss);
    return losses;
}

} // namespace

TEST_P(Pipelines, GivesTheBitsOfASequentialRun) {
    const std::string kind = GetParam();
    const fs::path expected = kind == "dualpipe" ? halves_ : one_rank_;
    const fs::path got = run(kind, pipeline(kind));
    ASSERT_EQ(losses_of(got).size(), 3u);
    EXPECT_EQ(losses_of(got), losses_of(expected));
    EXPECT_TRUE(same_tensors(got, expected));
    // What stands in the checkpoint of step 2 is all that step 3 needs. Of these kinds a rank has
    // the same layers as of 1f1b, which resumes with tied embeddings below.
    if (kind == "gpipe" || kind == "1f1b" || kind == "zb-h1" || kind == "zb-h2")
        return;
    const fs::path resumed = workspace_->path() / (kind + "-resumed");
    Flags flags = {"train",         "--resume", (got / "checkpoints" / "step-2").string(),
                   "--steps",       "3",        "--out",
                   resumed.string()};
    const Finished finished = workspace_->bellows(flags);
    ASSERT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_TRUE(same_tensors(resumed, expected));
}

INSTANTIATE_TEST_SUITE_P(Kinds, Pipelines,
                         testing::Values("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v",
                                         "dualpipe", "dualpipev"),
                         [](const auto& kind) {
                             std::string name = kind.param;
                             std::erase(name, '-');
                             return name;
                         });

/// What the two of a pair do while the other's tokens travel does not change the bits.
TEST_F(Pipelines, OverlappedPairsGiveThoseBitsToo) {
    const fs::path expected = run("ep2", {"--ranks", "2", "--ep", "2", "--micro-batches", "2"});
    for (const auto& [name, mode] : {std::pair("auto", "auto"),
                                     {"apart", "apart"},
                                     {"given", "MLP(B) MLP(W) MLP(F) ATTN(B) ATTN(W) ATTN(F)"}}) {
        SCOPED_TRACE(name);
        const fs::path got = workspace_->path() / ("pairs-" + std::string(name));
        Flags flags = pairs(mode);
        flags.insert(flags.end(), {"--steps", "3"});
        const Finished finished =
            workspace_->bellows(workspace_->train_arguments(got.filename().string(), flags));
        ASSERT_EQ(finished.exit_code, 0) << finished.errors;
        EXPECT_EQ(finished.errors, "");
        if (std::string(name) == "auto")
            expect_a_report(finished.out);
        EXPECT_EQ(losses_of(got), losses_of(expected));
        EXPECT_TRUE(same_tensors(got, expected));
        // The picture has pairs above each other, or none.
        EXPECT_EQ(bellows::content_of(got / "report.svg").find("pair's") == std::string::npos,
                  std::string(name) == "apart");
        // Work has the name of its op.
        const std::string trace = bellows::content_of(got / "trace.json");
        for (const char* op : {"\"F0.m1\"", "\"I1.m0\"", "\"W0.m1\""})
            EXPECT_NE(trace.find("\"op\":" + std::string(op)), std::string::npos) << op;
    }
}

TEST_F(Pipelines, FromDeviceToDeviceTheBitsAreTheSame) {
    Flags flags = pipeline("dualpipe");
    flags.insert(flags.end(), {"--device-link", "host", "--steps", "3"});
    const Finished finished = workspace_->bellows(workspace_->train_arguments("linked", flags));
    ASSERT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_NE((finished.out + finished.errors).find("are linked (host)"), std::string::npos)
        << finished.out << finished.errors;
    const fs::path got = workspace_->path() / "linked";
    EXPECT_EQ(losses_of(got), losses_of(halves_));
    EXPECT_TRUE(same_tensors(got, halves_));
}

/// Both ends of the model have the embedding; of data-parallel ranks each has a partner.
TEST_F(Pipelines, TiedEmbeddingsGiveTheBitsOfASequentialRun) {
    const auto tied = [](const std::string& name, Flags flags) {
        flags.insert(flags.end(), {"--set", "model.tied_embeddings=true"});
        return run("tied-" + name, flags);
    };
    const fs::path expected = tied("one-rank", {"--ranks", "1", "--micro-batches", "4"});
    for (const char* kind : {"1f1b", "zb-v"}) {
        SCOPED_TRACE(kind);
        const fs::path got = tied(kind, pipeline(kind));
        EXPECT_EQ(losses_of(got), losses_of(expected));
        EXPECT_TRUE(same_tensors(got, expected));
    }
    const fs::path resumed = workspace_->path() / "tied-resumed";
    const fs::path saved = workspace_->path() / "tied-1f1b" / "checkpoints" / "step-2";
    const Finished finished = workspace_->bellows(
        {"train", "--resume", saved.string(), "--steps", "3", "--out", resumed.string()});
    ASSERT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_TRUE(same_tensors(resumed, expected));
    const fs::path flat = tied("flat", {"--ranks", "2", "--dp", "2", "--micro-batches", "2"});
    const fs::path both = tied("both", {"--ranks", "4", "--pp", "2", "--dp", "2", "--micro-batches",
                                        "2", "--pipeline", "zb-h1"});
    EXPECT_EQ(losses_of(both), losses_of(flat));
    EXPECT_TRUE(same_tensors(both, flat));
}

TEST_F(Pipelines, AgreeInFp8) {
    const auto in_fp8 = [](const std::string& kind) {
        Flags flags = pipeline(kind);
        flags.insert(flags.end(), {"--precision", "fp8"});
        return run(kind + "-fp8", flags);
    };
    const fs::path expected = in_fp8("1f1b");
    for (const char* kind : {"zb-h2", "zb-v"}) {
        const fs::path got = in_fp8(kind);
        EXPECT_EQ(losses_of(got), losses_of(expected)) << kind;
        EXPECT_TRUE(same_tensors(got, expected)) << kind;
    }
}

TEST_F(Pipelines, WhatCannotBeIsRefusedWithTheRule) {
    const auto refused = [&](const Flags& flags, const char* part) {
        expect_one_line(workspace_->bellows(workspace_->train_arguments("refused", flags)), 2,
                        part);
    };
    refused({"--steps", "1", "--pipeline", "2f2b"}, "there is no schedule \"2f2b\"");
    refused({"--steps", "1", "--ranks", "2", "--pp", "2", "--micro-batches", "2", "--pipeline",
             "dualpipe"},
            "twice as many micro-batches as ranks");
    refused(
        {"--steps", "1", "--ranks", "4", "--pp", "4", "--micro-batches", "4", "--pipeline", "zb-v"},
        "makes 8 stages");
}
