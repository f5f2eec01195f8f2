// SPDX-License-Identifier: MIT
// `generate` and `chat` as their users call them: many prompts, standard input, settings that are
// refused, and conversations.
#include "e2e/runs.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;

/// One run of a model of bytes, and one with a tokenizer that has a chat template.
class Generate : public testing::Test {
protected:
    static void SetUpTestSuite() {
        workspace_ = std::make_unique<Workspace>();
        run_ = workspace_->train("run", {"--steps", "60"});
        const fs::path qwen = fs::path(BELLOWS_TOKENIZERS) / "qwen";
        chat_run_ = workspace_->train("chat", {"--steps", "2", "--tokenizer", qwen.string(),
                                               "--set", "model.vocabulary=605"});
    }
    static void TearDownTestSuite() { workspace_.reset(); }

    static Flags command(const char* name, const fs::path& run, const Flags& flags) {
        Flags arguments = {name, "--checkpoint", run.string()};
        arguments.insert(arguments.end(), flags.begin(), flags.end());
        return arguments;
    }
    static Finished generate(const Flags& flags) {
        return workspace_->bellows(command("generate", run_, flags));
    }
    static Finished with_input(const std::string& input, const Flags& arguments) {
        const fs::path file = workspace_->write("input.txt", input);
        Flags shell = {"/bin/sh", "-c", R"(exec "$@" < "$0")", file.string(), program()};
        shell.insert(shell.end(), arguments.begin(), arguments.end());
        return workspace_->run(shell);
    }
    static Finished chat(const std::string& input, const Flags& flags = {}) {
        Flags all = {"--tokens", "6",       "--temperature", "0",
                     "--exact",  "--times", "--context",     "512"};
        all.insert(all.end(), flags.begin(), flags.end());
        return with_input(input, command("chat", chat_run_, all));
    }
    static std::vector<Json> lines_of(const Finished& finished) {
        EXPECT_EQ(finished.exit_code, 0) << finished.errors;
        std::vector<Json> lines;
        std::istringstream stream(finished.out);
        for (std::string line; std::getline(stream, line);)
            lines.push_back(Json::parse(line));
        return lines;
    }

    static std::unique_ptr<Workspace> workspace_;
    static fs::path run_, chat_run_;
};

std::unique_ptr<Workspace> Generate::workspace_;
fs::path Generate::run_;
fs::path Generate::chat_run_;

/// Bytes that are no UTF-8 as JSON shows them.
std::string shown(const std::string& text) {
    return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// What --times says of each answer: tokens of the conversation, and those found in the cache.
struct Found {
    std::uint64_t tokens = 0, cached = 0;
};

std::vector<Found> found_of(const Finished& finished) {
    static const std::regex kLine(
        R"(\((\d+) tokens, (\d+) of them in the cache; prompt: [^\n]*; text: [^\n]*\)\n)");
    std::vector<Found> found;
    for (std::sregex_iterator at(finished.errors.begin(), finished.errors.end(), kLine), end;
         at != end; ++at)
        found.push_back({std::stoull((*at)[1]), std::stoull((*at)[2])});
    return found;
}

std::string long_message(int times = 8) {
    std::string text = "Say";
    for (int i = 0; i < times; ++i)
        text += " why embers glow " + std::to_string(i);
    return text;
}

} // namespace

TEST_F(Generate, ManyPromptsHaveTheTextsThatEachHasAlone) {
    const std::vector<std::string> prompts = {"the bel", "and", "slow embers glow again and the",
                                              "glow", "the bellows breathe and slow embers gl"};
    std::string file;
    for (const std::string& prompt : prompts)
        file += prompt + "\n\n"; // an empty line is no prompt
    // Longer than the 32 tokens that the model sees.
    const Flags settings = {"--exact", "--temperature", "1", "--seed", "3", "--tokens", "40"};
    Flags many = settings;
    many.insert(many.end(), {"--json", "--prompts", workspace_->write("prompts.txt", file)});
    const std::vector<Json> lines = lines_of(generate(many));
    ASSERT_EQ(lines.size(), prompts.size());
    for (std::size_t i = 0; i < prompts.size(); ++i) {
        const Json& line = lines[i];
        EXPECT_EQ(line.size(), 5u) << line;
        EXPECT_EQ(line.at("prompt"), prompts[i]);
        EXPECT_EQ(line.at("finish_reason"), "length");
        EXPECT_EQ(line.at("prompt_tokens"), prompts[i].size()); // bytes
        EXPECT_EQ(line.at("tokens"), 40);
        Flags alone = settings;
        alone.insert(alone.end(), {"--prompt", prompts[i]});
        const Finished text = generate(alone);
        EXPECT_EQ(text.exit_code, 0) << text.errors;
        EXPECT_EQ(shown(text.out), shown(prompts[i] + line.at("text").get<std::string>() + "\n"));
        alone.push_back("--json");
        EXPECT_EQ(lines_of(generate(alone)), std::vector<Json>{line});
    }
    EXPECT_NE(lines[0].at("text"), lines[1].at("text"));
}

TEST_F(Generate, RanksShareThePromptsAndWriteTheSame) {
    const std::string prompts = workspace_->write("shared.txt", "the bel\nand\nslow\nglow\nem\n");
    const Flags settings = {"--exact", "--temperature", "1",    "--tokens",
                            "40",      "--prompts",     prompts};
    Flags shared = settings;
    shared.insert(shared.end(), {"--ranks", "4", "--allow-degraded"});
    const Finished alone = generate(settings), together = generate(shared);
    EXPECT_EQ(together.exit_code, 0) << together.errors;
    EXPECT_EQ(together.out, alone.out);
    EXPECT_NE(together.errors.find("; text: "), std::string::npos) << together.errors;
    // One prompt is for one of them; the others have nothing to do.
    const Flags one = {"--prompt", "the bel", "--exact", "--temperature", "0", "--tokens", "9"};
    Flags one_shared = one;
    one_shared.insert(one_shared.end(), {"--ranks", "2"});
    EXPECT_EQ(generate(one_shared).out, generate(one).out);
    EXPECT_NE(generate({"--file", "-", "--tokens", "3", "--ranks", "2"})
                  .errors.find("cannot share standard input"),
              std::string::npos);
    EXPECT_NE(generate({"--prompt", "a", "--tokens", "3", "--allow-degraded"})
                  .errors.find("--allow-degraded goes with --ranks"),
              std::string::npos);
}

TEST_F(Generate, ReadsFilesAndStandardInput) {
    const Flags settings = {"--temperature", "0", "--tokens", "8"};
    const auto with = [&](Flags flags) {
        flags.insert(flags.end(), settings.begin(), settings.end());
        return command("generate", run_, flags);
    };
    const Finished prompt = workspace_->bellows(with({"--prompt", "the bel"}));
    EXPECT_EQ(prompt.exit_code, 0) << prompt.errors;
    EXPECT_EQ(prompt.out.rfind("the bel", 0), 0u) << prompt.out;
    EXPECT_TRUE(std::regex_match(
        prompt.errors, std::regex(R"(prompt: 7 tokens, [\d.]+ tokens/s; text: \d+ tokens, )"
                                  R"([\d.]+ tokens/s\n)")))
        << prompt.errors;
    const fs::path file = workspace_->write("prompt.txt", "the bel");
    EXPECT_EQ(workspace_->bellows(with({"--file", file.string()})).out, prompt.out);
    EXPECT_EQ(with_input("the bel", with({"--file", "-"})).out, prompt.out);
    EXPECT_EQ(with_input("the bel\n", with({"--prompts", "-"})).out, prompt.out);
    const Finished two = with_input("the bel\nthe bel", with({"--prompts", "-"}));
    EXPECT_EQ(two.out, prompt.out + "\n" + prompt.out);
}

TEST_F(Generate, EndsBeforeAStopString) {
    const Flags settings = {"--prompt", "the bel", "--temperature", "1", "--seed", "5",
                            "--tokens", "60",      "--json"};
    const std::string text = lines_of(generate(settings)).at(0).at("text");
    std::optional<std::size_t> at; // of three letters that did not stand before
    for (std::size_t i = 5; i + 3 <= text.size() && !at; ++i) {
        const std::string three = text.substr(i, 3);
        if (std::ranges::all_of(three, [](unsigned char c) { return c < 128 && c >= ' '; }) &&
            text.find(three) == i)
            at = i;
    }
    ASSERT_TRUE(at.has_value()) << text;
    Flags stopped = settings;
    stopped.insert(stopped.end(), {"--stop", "no such text", "--stop", text.substr(*at, 3)});
    const Json line = lines_of(generate(stopped)).at(0);
    EXPECT_EQ(line.at("text"), text.substr(0, *at));
    EXPECT_EQ(line.at("finish_reason"), "stop string");
    EXPECT_LT(line.at("tokens"), 60);
}

TEST_F(Generate, RefusesWhatMakesNoSense) {
    const auto refused = [](const Flags& flags, std::string_view part) {
        SCOPED_TRACE(part);
        const Finished finished = generate(flags);
        expect_one_line(finished, 2, part);
        EXPECT_EQ(finished.out, "");
    };
    const std::string empty = workspace_->write("empty.txt", "\n\n").string();
    constexpr std::string_view kOne = "give one of --prompt, --file and --prompts";
    refused({"--tokens", "4"}, kOne);
    refused({"--tokens", "4", "--prompt", "a", "--file", "-"}, kOne);
    refused({"--tokens", "4", "--prompt", "a", "--prompts", empty}, kOne);
    refused({"--tokens", "4", "--prompts", empty}, "has no line with a prompt");
    refused({"--tokens", "4", "--prompts", empty + "x"}, empty + "x");
    refused({"--tokens", "4", "--prompt", "a", "--cache-type", "nonsense"}, "f32, bf16, fp8");
    refused({"--tokens", "4", "--prompt", "a", "--cache-type", "fp8"}, "choose bf16");
    refused({"--tokens", "4", "--prompt", "a", "--system", "b"}, "--system goes with --chat");
    refused({"--tokens", "4", "--prompt", "a", "--top-p", "2"}, "top_p is 2");
    refused({"--tokens", "4", "--prompt", "a", "--min-p", "-1"}, "min_p is -1");
    refused({"--tokens", "4", "--prompt", "a", "--stop", ""}, "a string of stop is 0 bytes long");
    refused({"--tokens", "0", "--prompt", "a"}, "--tokens must be at least 1");
    constexpr std::string_view kNoTemplate = "has no chat template";
    expect_one_line(generate({"--tokens", "4", "--prompt", "a", "--chat"}), 3, kNoTemplate);
    expect_one_line(with_input("a\n", command("chat", run_, {})), 3, kNoTemplate);
}

TEST_F(Generate, AChatFindsWhatWasSaidInTheCache) {
    const Finished finished = chat(long_message() + "\n\nAnd the bellows?\n");
    EXPECT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_GT(finished.out.size(), 2u);
    const std::vector<Found> found = found_of(finished);
    ASSERT_EQ(found.size(), 2u) << finished.errors;
    EXPECT_GT(found[0].tokens, 64u);
    EXPECT_EQ(found[0].cached, 0u);
    EXPECT_GT(found[1].tokens, found[0].tokens);
    EXPECT_GE(found[1].cached, found[0].tokens / 64 * 64);
    EXPECT_LT(found[1].cached, found[1].tokens);
}

TEST_F(Generate, AFullContextForgetsTheOldestQuestion) {
    const Finished finished = chat(long_message(40) + "\nAnd the bellows?\n");
    EXPECT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_NE(finished.errors.find("the oldest question is forgotten"), std::string::npos)
        << finished.errors;
    const std::vector<Found> found = found_of(finished);
    ASSERT_EQ(found.size(), 2u) << finished.errors;
    EXPECT_GT(found[0].tokens, 512u);
    EXPECT_LT(found[1].tokens, 64u);
}

TEST_F(Generate, AChatAnswersAsGenerateDoes) {
    const Finished answer = chat("Who are you?"); // the last line needs no end
    EXPECT_EQ(answer.exit_code, 0) << answer.errors;
    const Finished generated =
        workspace_->bellows(command("generate", chat_run_,
                                    {"--chat", "--prompt", "Who are you?", "--tokens", "6",
                                     "--temperature", "0", "--exact", "--context", "512"}));
    EXPECT_EQ(generated.exit_code, 0) << generated.errors;
    EXPECT_EQ(answer.out, generated.out);
    EXPECT_EQ(chat("Who are you?", {"--system", "Be short."}).exit_code, 0);
}

TEST_F(Generate, AChatBeginsAnewAndEnds) {
    const Finished once = chat(long_message() + "\n");
    const Finished cleared =
        chat(long_message() + "\n/clear\n" + long_message() + "\n/exit\nAnd the bellows?\n");
    EXPECT_EQ(cleared.exit_code, 0) << cleared.errors;
    EXPECT_EQ(cleared.out, once.out + once.out);
    const std::vector<Found> found = found_of(cleared);
    ASSERT_EQ(found.size(), 2u) << cleared.errors;
    EXPECT_EQ(found[1].tokens, found[0].tokens);
    const Finished silent = chat("");
    EXPECT_EQ(silent.exit_code, 0) << silent.errors;
    EXPECT_EQ(silent.out, "");
    EXPECT_EQ(silent.errors, "");
}
