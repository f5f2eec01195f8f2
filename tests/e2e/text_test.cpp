// SPDX-License-Identifier: MIT
// The text of a run is tokenised once, and a checkpoint has all that generating and going on need.
#include "checkpoint/state_file.hpp"
#include "e2e/runs.hpp"
#include "text/small_model.hpp"

#include <map>

#include <sys/stat.h>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

ino_t number_of(const fs::path& file) {
    struct stat info{};
    EXPECT_EQ(::stat(file.c_str(), &info), 0) << file;
    return info.st_ino;
}

Finished resume(const Workspace& workspace, const fs::path& run, const char* steps) {
    return workspace.bellows({"train", "--resume", run.string(), "--steps", steps});
}

/// As a version before wrote it: without the tokenizer.
void forget_tokenizer(const fs::path& step) {
    std::map<std::string, bellows::CheckpointFile> files;
    const bellows::CheckpointState state =
        bellows::parse_checkpoint_state(step / bellows::kStateFile, files);
    ASSERT_EQ(files.erase("tokenizer.model"), 1u);
    std::ofstream(step / bellows::kStateFile) << bellows::format_checkpoint_state(state, files);
    fs::remove(step / "tokenizer.model");
}

} // namespace

TEST(Tokens, AreMadeOnce) {
    const Workspace workspace;
    const fs::path run = workspace.train("run", {"--ranks", "2", "--steps", "2"});
    const fs::path tokens = run / "tokens.bin";
    const ino_t first = number_of(tokens);
    const Finished again = resume(workspace, run, "3");
    ASSERT_EQ(again.exit_code, 0) << again.errors;
    EXPECT_EQ(number_of(tokens), first) << "the same text was tokenised again";
    workspace.write("corpus.txt", bellows::content_of(workspace.data()) + "and more text.\n");
    const Finished other = resume(workspace, run, "4");
    ASSERT_EQ(other.exit_code, 0) << other.errors;
    EXPECT_NE(number_of(tokens), first) << "other text, the old tokens";
}

TEST(Tokens, OfALongTextShowHowFarTheyAre) {
    const Workspace workspace;
    std::string text;
    while (text.size() < 5'000'000)
        text += bellows::content_of(workspace.data());
    workspace.write("corpus.txt", text);
    const fs::path run = workspace.path() / "run";
    // Too little is kept out for a sequence, which shows when the tokens are there.
    const Finished refused = workspace.bellows(workspace.train_arguments(
        "run", {"--steps", "1", "--config",
                workspace.edited_config("seq = 32", "seq = 32\nholdout = 0.000001").string()}));
    expect_one_line(refused, 2, "holdout");
    EXPECT_TRUE(fs::exists(run / "tokens.bin"));
    const Finished good = workspace.bellows(workspace.train_arguments("run", {"--steps", "1"}));
    EXPECT_EQ(good.exit_code, 0) << good.errors;
    EXPECT_NE(good.out.find("tokens in tokens.bin"), std::string::npos) << good.out;
}

TEST(Tokenizer, StandsInTheCheckpoint) {
    const Workspace workspace;
    const bellows::TemporaryFolder models;
    const fs::path model = bellows::small_model(models, "");
    const std::string content = bellows::content_of(model);
    const fs::path config =
        workspace.edited_config("[train]", "[train]\ntokenizer = \"" + model.string() + "\"");
    const fs::path run = workspace.train("run", {"--steps", "2", "--config", config.string()});
    EXPECT_EQ(bellows::content_of(run / "checkpoints/step-2/tokenizer.model"), content);

    const fs::path moved = workspace.path() / "elsewhere", old = workspace.path() / "old";
    fs::copy(run, old, fs::copy_options::recursive);
    forget_tokenizer(old / "checkpoints/step-2");
    fs::rename(run, moved);
    const auto generate = [&](const fs::path& from) {
        return workspace.bellows({"generate", "--checkpoint", from.string(), "--prompt",
                                  "the forge", "--tokens", "5", "--temperature", "0"});
    };
    const Finished with_file = generate(old);
    fs::remove(model);
    const Finished without_file = generate(moved);
    EXPECT_EQ(with_file.exit_code, 0) << with_file.errors;
    EXPECT_EQ(without_file.exit_code, 0) << without_file.errors;
    EXPECT_EQ(with_file.out, without_file.out);
    expect_one_line(generate(old), 2, model.string());

    const Finished resumed = resume(workspace, moved, "3");
    EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
    EXPECT_EQ(bellows::content_of(moved / "checkpoints/step-3/tokenizer.model"), content);
    expect_one_line(resume(workspace, old, "3"), 2, model.string());

    // A file that is no model.
    std::ofstream(model) << content.substr(0, content.size() / 2);
    expect_one_line(workspace.bellows(workspace.train_arguments(
                        "bad", {"--steps", "1", "--config", config.string()})),
                    2, "no sound sentencepiece model");
    EXPECT_FALSE(fs::exists(workspace.path() / "bad"));
}

// A Hugging Face tokenizer goes from the run into its checkpoint, and on into an exported folder.
// The vocabulary is no multiple of eight.
TEST(Tokenizer, OfAFolderGoesAllTheWay) {
    const Workspace workspace;
    const fs::path qwen = fs::path(BELLOWS_TOKENIZERS) / "qwen", out = workspace.path() / "out";
    const fs::path run = workspace.train(
        "run", {"--steps", "2", "--tokenizer", qwen.string(), "--set", "model.vocabulary=605"});
    const auto answer = [&](const fs::path& checkpoint) {
        const Finished finished =
            workspace.bellows({"generate", "--checkpoint", checkpoint.string(), "--chat",
                               "--prompt", "Who are you?", "--tokens", "3", "--temperature", "0"});
        EXPECT_EQ(finished.exit_code, 0) << finished.errors;
        EXPECT_EQ(finished.out.find("Who are you?"), std::string::npos) << finished.out;
        return finished.out;
    };
    const std::string said = answer(run);
    EXPECT_GT(said.size(), 1u);
    const Finished exported =
        workspace.bellows({"export", "--checkpoint", run.string(), "--out", out.string()});
    ASSERT_EQ(exported.exit_code, 0) << exported.errors;
    EXPECT_EQ(bellows::content_of(out / "tokenizer.json"),
              bellows::content_of(qwen / "tokenizer.json"));
    EXPECT_EQ(answer(out), said);
    const Finished tuned = workspace.bellows(
        {"train", "--init", out.string(), "--data", workspace.data().string(), "--steps", "1",
         "--batch", "2", "--seq", "16", "--out", (workspace.path() / "tuned").string()});
    EXPECT_EQ(tuned.exit_code, 0) << tuned.errors;
}
