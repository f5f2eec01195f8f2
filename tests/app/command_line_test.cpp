// SPDX-License-Identifier: MIT
// The command line with recorded subcommands in place of those that need a device. Started by its
// own launcher this program is a rank, see main().
#include "app/command_line.hpp"
#include "app/commands.hpp"
#include "app/exit_code.hpp"

#include "support/temporary_folder.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <new>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <vector>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

struct Result {
    int code = -1;
    std::string out;
    std::string errors;
    std::optional<TrainOptions> train;
    std::optional<GenerateOptions> generate;
};

/// What a rank of a launched run does: leaves its mark, or dies.
int train_as_rank(const TrainOptions& options) {
    const std::string rank = std::getenv("OMPI_COMM_WORLD_RANK");
    if (rank == "0") {
        prepare_output(options);
    }
    std::ofstream(options.out.string() + ".rank-" + rank) << options.ranks();
    const std::uint64_t seed = options.config.train.seed; // says what goes wrong
    if (seed >= 666 && rank == "1") {
        ::raise(SIGKILL);
    }
    if (seed == 666) {
        throw Error(ErrorCode::PeerLost, "the peer 1 went", 1);
    }
    return kExitGood;
}

Result run(std::vector<std::string> arguments, const std::function<int()>& body = {}) {
    Result result;
    Commands commands;
    commands.train = [&](const TrainOptions& options) {
        result.train = options;
        return body ? body() : 0;
    };
    commands.generate = [&](const GenerateOptions& options) {
        result.generate = options;
        return 0;
    };
    arguments.insert(arguments.begin(), "bellows");
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) {
        argv.push_back(argument.c_str());
    }
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    result.code = run_command_line(static_cast<int>(argv.size()), argv.data(), commands);
    result.out = testing::internal::GetCapturedStdout();
    result.errors = testing::internal::GetCapturedStderr();
    return result;
}

/// Exit code 2 and exactly one line that holds `part`; nothing ran.
void expect_refused(const Result& result, const std::string& part) {
    EXPECT_EQ(result.code, 2) << result.errors;
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << result.errors;
    EXPECT_NE(result.errors.find(part), std::string::npos) << result.errors;
    EXPECT_EQ(result.out, "");
    EXPECT_FALSE(result.train || result.generate);
}

/// "plan experts" → {"plan", "experts", "--help"}
std::vector<std::string> with_help(const std::string& command) {
    std::istringstream typed(command);
    std::vector<std::string> words;
    for (std::string word; typed >> word;)
        words.push_back(word);
    words.push_back("--help");
    return words;
}

class CommandLine : public testing::Test {
protected:
    CommandLine() {
        std::string text;
        for (int i = 0; i < 2000; ++i) {
            text += "word " + std::to_string(i) + "\n";
        }
        data = folder.write("data/text.txt", text).string();
    }

    std::vector<std::string> train_with(std::vector<std::string> more) const {
        more.insert(more.begin(), {"train", "--config", "tiny", "--data", data, "--steps", "10",
                                   "--out", (folder.path() / "run").string()});
        return more;
    }

    /// A checkpoint as a run with the tiny preset would leave it.
    fs::path write_checkpoint(std::uint64_t step, const std::string& config_text) const {
        const fs::path run_folder = folder.path() / "old";
        begin_checkpoint(run_folder, step);
        SafetensorsWriter shard(checkpoint_temporary(run_folder, step) / "model.safetensors",
                                {{"w", StoredType::U8, {4}}});
        shard.write("w", std::as_bytes(std::span("abcd", 4)));
        shard.finish();
        CheckpointState state;
        state.step = step;
        state.layout = {1, 1, 1};
        return commit_checkpoint(run_folder, state, {"model.safetensors"},
                                 {{kConfigFile, config_text}});
    }

    TemporaryFolder folder;
    std::string data;
};

} // namespace

TEST(ExitCodes, FollowFromTheError) {
    EXPECT_EQ(exit_code_of(ErrorCode::InvalidArgument), 2);
    EXPECT_EQ(exit_code_of(ErrorCode::Io), 2);
    EXPECT_EQ(exit_code_of(ErrorCode::Corrupt), 2);
    EXPECT_EQ(exit_code_of(ErrorCode::Unsupported), 3);
    EXPECT_EQ(exit_code_of(ErrorCode::DeviceLost), 3);
    EXPECT_EQ(exit_code_of(ErrorCode::PeerLost), 4);
    EXPECT_EQ(exit_code_of(ErrorCode::Timeout), 3) << "heartbeats say who is lost";
    EXPECT_EQ(exit_code_of(ErrorCode::Internal), 1);
}

TEST_F(CommandLine, AnyKeyOfTheConfigurationCanBeSet) {
    const std::string model = folder.write("tokens.model", "x").string();
    const Result result = run(train_with({"--set",        "train.lr=0.25",
                                          "--set",        "model.layers=5",
                                          "--set",        "train.precision=bf16",
                                          "--set",        "train.pairs=\"apart\"",
                                          "--set",        "model.router_bias=false",
                                          "--set",        "model.bias_update_rate=0",
                                          "--set",        "train.beta1=0.5",
                                          "--holdout",    "0.2",
                                          "--warmup",     "7",
                                          "--decay",      "90",
                                          "--eval-every", "4",
                                          "--set",        "train.lr_min=1e-5",
                                          "--lr",         "0.5",
                                          "--tokenizer",  "bytes"}));
    ASSERT_EQ(result.code, 0) << result.errors;
    const RunConfig& config = result.train->config;
    EXPECT_EQ(config.train.lr, 0.5) << "the flag goes before --set";
    EXPECT_EQ(config.train.lr_min, 1e-5);
    EXPECT_EQ(config.train.beta1, 0.5);
    EXPECT_EQ(config.train.precision, Precision::BF16);
    EXPECT_EQ(config.train.pairs, parse_pair_mode("apart"));
    EXPECT_EQ(config.model.layers, 5u);
    EXPECT_FALSE(config.model.router_bias);
    EXPECT_EQ(config.train.holdout, 0.2);
    EXPECT_EQ(config.train.warmup_steps, 7u);
    EXPECT_EQ(config.train.decay_steps, 90u);
    EXPECT_EQ(config.train.eval_every, 4u);
    EXPECT_EQ(config.train.tokenizer, "bytes");
    // What is not set stays.
    RunConfig rest = load_run_config("tiny");
    EXPECT_EQ(config.model.hidden, rest.model.hidden);
    EXPECT_EQ(config.train.clip_norm, rest.train.clip_norm);

    expect_refused(run(train_with({"--set", "train.lrr=1"})), "did you mean \"lr\"?");
    expect_refused(run(train_with({"--set", "model.layer=1"})), "did you mean \"layers\"?");
    expect_refused(run(train_with({"--set", "layers=1"})), "model.KEY=VALUE");
    expect_refused(run(train_with({"--set", "trian.lr=1"})), "\"trian\"");
    expect_refused(run(train_with({"--set", "train.lr=fast"})), "lr must be a number");
    expect_refused(run(train_with({"--set", "model.layers=2.5"})), "layers must be a whole number");
    expect_refused(run(train_with({"--set", "model.hidden=129"})), "take 128 or 136");
    expect_refused(run(train_with({"--set", "train.lr=1\nbatch=3"})), "lr must be a number");
    expect_refused(run(train_with({"--set"})), "--set");
    expect_refused(run(train_with({"--eval-every", "5"})), "--holdout");
    expect_refused(run(train_with({"--tokenizer", "/none/tokens.model"})), "/none/tokens.model");
}

TEST_F(CommandLine, FlagsOverrideTheConfiguration) {
    const Result result = run(
        train_with({"--batch", "8", "--micro-batches", "2", "--seq", "32", "--lr", "0.5", "--seed",
                    "9", "--precision", "bf16", "--device", "0,1", "--checkpoint-every", "5"}));
    ASSERT_EQ(result.code, 0) << result.errors;
    ASSERT_TRUE(result.train);
    const TrainConfig& train = result.train->config.train;
    EXPECT_EQ(train.data, (std::vector<std::string>{data}));
    EXPECT_EQ(train.steps, 10u);
    EXPECT_EQ(train.batch, 8u);
    EXPECT_EQ(train.micro_batches, 2u);
    EXPECT_EQ(train.seq, 32u);
    EXPECT_EQ(train.lr, 0.5);
    EXPECT_EQ(train.seed, 9u);
    EXPECT_EQ(train.precision, Precision::BF16);
    EXPECT_EQ(train.device, "0,1");
    EXPECT_EQ(train.checkpoint_every, 5u);
    EXPECT_EQ(result.train->layout, (RunLayout{1, 1, 1}));
    EXPECT_EQ(result.train->out, folder.path() / "run");
    EXPECT_FALSE(fs::exists(folder.path() / "run")) << "only a run makes its folder";
    // config.toml as run gives the same run again.
    const RunConfig again = parse_run_config(result.train->config_text(), "again", "/");
    EXPECT_TRUE(again.train == train);
}

// What a script gives by itself can be followed by what its user wants.
TEST_F(CommandLine, TheLastOfRepeatedFlagsCounts) {
    const std::string more = folder.write("more/text.txt", "more").string();
    const std::string other = (folder.path() / "other").string();
    const Result result = run(
        {"train", "--config", "none.toml", "--out",       "/none", "--ranks",     "3",   "--device",
         "gpu",   "--lr",     "1",         "--data",      data,    "--precision", "f32", "--config",
         "tiny",  "--out",    other,       "--ranks",     "1",     "--device",    "cpu", "--lr",
         "0.5",   "--data",   more,        "--precision", "bf16"});
    ASSERT_EQ(result.code, 0) << result.errors;
    ASSERT_TRUE(result.train);
    EXPECT_EQ(result.train->config_name, "tiny");
    EXPECT_EQ(result.train->out, other);
    EXPECT_EQ(result.train->ranks(), 1u);
    const TrainConfig& train = result.train->config.train;
    EXPECT_EQ(train.device, "cpu");
    EXPECT_EQ(train.lr, 0.5);
    EXPECT_EQ(train.precision, Precision::BF16);
    EXPECT_EQ(train.data, (std::vector<std::string>{data, more})) << "data collects";
    RunConfig config = load_run_config("tiny");
    write_checkpoint(10, to_toml(config));
    const std::string old = (folder.path() / "old").string();
    const Result text =
        run({"generate", "--prompt", "a", "--tokens", "1", "--checkpoint", "/none", "--checkpoint",
             old, "--prompt", "b", "--tokens", "2", "--temperature", "1", "--temperature", "0"});
    ASSERT_EQ(text.code, 0) << text.errors;
    EXPECT_EQ(text.generate->prompts, std::vector<std::string>{"b"});
    EXPECT_EQ(text.generate->text.tokens, 2u);
    EXPECT_EQ(text.generate->text.sampling.temperature, 0);
}

TEST_F(CommandLine, BadInputIsRefusedWithOneLine) {
    const std::string out = (folder.path() / "run").string();
    expect_refused(run({}), "subcommand");
    expect_refused(run({"fly"}), "fly");
    expect_refused(run({"train"}), "--config");
    expect_refused(run({"train", "--config", "v2-lite"}), "--data");
    expect_refused(run({"train", "--config", "tiny", "--data", data}), "--out");
    expect_refused(run({"train", "--config", "tiny", "--data", "--out", out}), "--out");
    expect_refused(run(train_with({"--fast"})), "--fast");
    expect_refused(run(train_with({"--lr", "quick"})), "--lr");
    expect_refused(run(train_with({"--batch", "-4"})), "--batch");
    expect_refused(run(train_with({"--batch", "0"})), "batch = 0");
    expect_refused(run(train_with({"--seed", "9223372036854775808"})),
                   "seed = 9223372036854775808");
    expect_refused(run(train_with({"--seed", "99999999999999999999999"})), "--seed");
    expect_refused(run(train_with({"--config", "none.toml"})), "none.toml");
    expect_refused(run(train_with({"--ranks", "3"})), "multiple of 3");
    expect_refused(run(train_with({"--ranks", "4", "--dp", "3"})), "3 ranks, not 4");
    expect_refused(run(train_with({"--ranks", "4", "--pp", "3"})), "stages");
    expect_refused(run(train_with({"--ranks", "4", "--ep", "3"})), "ep = 3");
    expect_refused(run(train_with({"--seq", "30000"})), "fewer than one sequence");
    expect_refused(run(train_with({"--ranks", "2", "--seq", "30000"})), "fewer than one sequence");
    expect_refused(run(train_with({"--data", "/does/not/exist"})), "/does/not/exist");
    folder.write("empty/none.txt", "");
    expect_refused(run({"train", "--config", "tiny", "--data", (folder.path() / "empty").string(),
                        "--steps", "1", "--out", out}),
                   "no text");
    folder.write("file", "x");
    expect_refused(run(train_with({"--out", (folder.path() / "file").string()})), "--out");
    EXPECT_FALSE(fs::exists(out)) << "nothing half-written";
}

TEST_F(CommandLine, ConfigurationFilesAreChecked) {
    const auto refuse = [&](const std::string& text, const std::string& part) {
        const fs::path file = folder.write("my.toml", text);
        expect_refused(run({"train", "--config", file.string(), "--data", data, "--out",
                            (folder.path() / "run").string()}),
                       part);
    };
    const std::string tiny = to_toml(load_run_config("tiny").model);
    refuse(tiny + "[train]\nstepss = 4\n", "stepss");
    refuse(tiny + "[modle]\n", "modle");
    refuse(tiny + "frobs = 4\n", "frobs");
    refuse("[model", "my.toml");
    refuse("", "my.toml");
    std::string odd = tiny;
    const std::size_t at = odd.find("qk_rope_head_dim = ");
    odd.insert(at + 19, "1"); // 16 → 116 is even; 3 is not
    odd.replace(at + 19, odd.find('\n', at) - at - 19, "3");
    refuse(odd, "qk_rope_head_dim");
}

// What stands in files and arguments neither steers the terminal nor floods it.
TEST_F(CommandLine, HostileTextIsQuotedAndBounded) {
    const std::string tiny = to_toml(load_run_config("tiny").model);
    const std::string escape = "\x1b]0;owned\x07\xc2\x9b"
                               "31m\xff",
                      long_name(1 << 19, 'k');
    const std::string quoted = "\"\\u001b]0;owned\\u0007\\u009b31m\""; // as TOML writes it
    const auto check = [](const Result& result) {
        EXPECT_EQ(result.code, 2);
        EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1);
        EXPECT_LT(result.errors.size(), 4200u);
        for (const char c : result.errors)
            EXPECT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= ' ') << result.errors;
        EXPECT_EQ(result.errors.find("\xc2\x9b"), std::string::npos) << result.errors;
        EXPECT_EQ(result.errors.find('\xff'), std::string::npos) << result.errors;
    };
    for (const std::string& text :
         {tiny + quoted + " = 4\n", tiny + "[" + quoted + "]\n", tiny + long_name + " = 4\n",
          tiny + "[train]\n" + quoted + " = 4\n", tiny + "[train]\n" + long_name + " = 4\n",
          tiny + "[train]\nprecision = " + quoted + "\n",
          tiny + "[train]\npipeline = " + quoted + "\n",
          tiny + "[train]\npairs = \"" + long_name + "\"\n",
          tiny + "[train]\ndevice = " + quoted + "\n", tiny + "[train]\na = " + escape + "\n",
          escape, "\"" + long_name, tiny + "[train]\n" + long_name + " = = 1\n"})
        check(run({"train", "--config", folder.write("my.toml", text).string(), "--data", data,
                   "--out", (folder.path() / "run").string()}));
    for (const std::string& text : {escape, long_name}) {
        check(run(train_with({"--set", "train." + text + "=1"})));
        check(run(train_with({"--set", text})));
        check(run(train_with({"--set", "train.precision=" + text})));
        check(run(train_with({"--" + text})));
        check(run(train_with({"--config", text})));
        check(run(train_with({"--pipeline", text})));
        check(run(train_with({"--pairs", text})));
        check(run(train_with({"--lr", text})));
        check(run({text}));
        check(run({"schedule", "--kind", text}));
        check(run({"schedule", "--pair", "--order", text}));
        check(run({"schedule", "--kind", "1f1b", "--costs", text + "=1"}));
        check(run({"schedule", "--kind", "1f1b", "--format", text}));
        check(run({"config", "--dump", text}));
        check(run({"plan", text}));
        check(run({"plan", "experts", "--loads", text, "--ranks", "1", "--slots", "1"}));
        const std::string loads = folder.write("loads.json", text).string();
        check(run({"plan", "experts", "--loads", loads, "--ranks", "1", "--slots", "1"}));
    }
    // Names in a checkpoint's manifest.
    RunConfig config = load_run_config("tiny");
    config.train.data = {data};
    const fs::path checkpoint = write_checkpoint(10, to_toml(config));
    for (const char* file : {"state.json", "model.safetensors", "config.toml"})
        for (const std::string& text :
             {quoted, "{" + quoted + ": " + quoted + "}", "{\"" + long_name + "\": [}", escape}) {
            if (!fs::exists(checkpoint / file))
                continue;
            const std::string good = content_of(checkpoint / file);
            const std::string name = fs::relative(checkpoint / file, folder.path()).string();
            folder.write(name, text);
            check(run({"train", "--resume", (folder.path() / "old").string(), "--steps", "20"}));
            folder.write(name, good);
        }
}

TEST_F(CommandLine, ErrorsOfTheRunGiveTheirCode) {
    const auto code = [&](const std::function<int()>& body) {
        return run(train_with({}), body).code;
    };
    EXPECT_EQ(code([] { return 1; }), 1);
    EXPECT_EQ(code([]() -> int { throw Error(ErrorCode::Unsupported, "x"); }), 3);
    EXPECT_EQ(code([]() -> int { throw Error(ErrorCode::PeerLost, "x", 2); }), 4);
    EXPECT_EQ(code([]() -> int { throw std::bad_alloc(); }), 3);
    EXPECT_EQ(code([]() -> int { throw std::runtime_error("x"); }), 1);
    const Result result =
        run(train_with({}), []() -> int { throw Error(ErrorCode::DeviceLost, "the device went"); });
    EXPECT_EQ(result.errors, "bellows: the device went\n");
}

TEST_F(CommandLine, HelpHasExamples) {
    for (const char* command : {"train", "generate", "info", "schedule", "plan experts"}) {
        const Result result = run(with_help(command));
        EXPECT_EQ(result.code, 0);
        EXPECT_NE(result.out.find("Examples:\n  bellows " + std::string(command)),
                  std::string::npos)
            << result.out;
        EXPECT_NE(result.out.find("Exit codes"), std::string::npos);
    }
    const Result help = run({"--help"});
    EXPECT_NE(help.out.find("train"), std::string::npos);
    EXPECT_EQ(help.out.find("selftest"), std::string::npos) << "what is not there is not offered";
    expect_refused(run({"selftest"}), "selftest");
}

// Eighty columns, and nothing is offered that is not there.
TEST_F(CommandLine, HelpFitsAndBashCompletesAllOfIt) {
    const auto script = folder.write("completion.bash", run({"completion", "bash"}).out);
    const auto completed = [&](const std::vector<std::string>& words) {
        std::string line;
        for (const std::string& word : words)
            line += " '" + word + "'";
        const auto out = folder.path() / "completed";
        const std::string command = "bash -c \"source '" + script.string() + "'; COMP_WORDS=(" +
                                    line + "); COMP_CWORD=" + std::to_string(words.size() - 1) +
                                    "; _bellows; printf '%s\\n' \\\"\\${COMPREPLY[@]}\\\"\" > '" +
                                    out.string() + "' 2>&1";
        EXPECT_EQ(std::system(command.c_str()), 0) << command;
        std::set<std::string> offered;
        std::istringstream lines(content_of(out));
        for (std::string one; std::getline(lines, one);)
            offered.insert(one);
        return offered;
    };
    const std::set<std::string> commands = completed({"bellows", ""});
    for (const char* command : {"train", "generate", "info", "schedule", "config", "plan",
                                "plan experts", "completion", ""}) {
        const std::string name = command;
        const std::vector<std::string> words = with_help(name);
        const Result help = run(words);
        ASSERT_EQ(help.code, 0);
        EXPECT_TRUE(help.out.ends_with("stays non-finite\n")) << "the exit codes end it";
        EXPECT_TRUE(name.empty() || commands.contains(words.front())) << command;
        std::set<std::string> flags;
        std::istringstream lines(help.out);
        for (std::string line; std::getline(lines, line);) {
            EXPECT_LE(line.size(), 80u) << line;
            const std::size_t at = line.starts_with("  -h,") ? 5 : 2;
            if (line.starts_with("  -"))
                flags.insert(line.substr(at, line.find(' ', at) - at));
        }
        EXPECT_TRUE(flags.contains("--help")) << help.out;
        if (name.empty()) {
            for (const std::string& flag : flags)
                EXPECT_TRUE(commands.contains(flag)) << flag;
        } else {
            std::vector<std::string> typed = {"bellows"};
            typed.insert(typed.end(), words.begin(), words.end() - 1);
            typed.push_back("--");
            EXPECT_EQ(completed(typed), flags) << command;
        }
    }
    EXPECT_EQ(completed({"bellows", "train", "--preci"}), std::set<std::string>{"--precision"});
    EXPECT_EQ(completed({"bellows", "train", "--precision", ""}),
              (std::set<std::string>{"bf16", "f32", "fp8"}));
    EXPECT_EQ(completed({"bellows", "schedule", "--kind", "zb"}),
              (std::set<std::string>{"zb-h1", "zb-h2", "zb-v"}));
    EXPECT_EQ(completed({"bellows", "plan", "e"}), std::set<std::string>{"experts"});
    EXPECT_EQ(completed({"bellows", "plan", "experts", "--loads", folder.path().string() + "/dat"}),
              std::set<std::string>{folder.path().string() + "/data"});
    EXPECT_TRUE(completed({"bellows", "train", "--config", "v"}).contains("v3-671b"));
    EXPECT_EQ(completed({"bellows", "train", "--out", folder.path().string() + "/dat"}),
              std::set<std::string>{folder.path().string() + "/data"});
    expect_refused(run({"completion", "fish"}), "bash");
}

TEST_F(CommandLine, WhatIsMistypedGetsACloseName) {
    expect_refused(run(train_with({"--bacth", "3"})), "did you mean \"--batch\"?");
    expect_refused(run(train_with({"--bacth=3"})), "did you mean \"--batch\"?");
    expect_refused(run({"trian"}), "did you mean \"train\"?");
    expect_refused(run({"plan", "expert"}), "did you mean \"experts\"?");
    expect_refused(
        run({"plan", "experts", "--loads", data, "--ranks", "1", "--slots", "1", "--jsn"}),
        "did you mean \"--json\"?; `bellows plan experts --help` lists the flags");
    expect_refused(run({"plan"}), "`bellows plan --help`");
    expect_refused(run({"plan", "experts"}), "`bellows plan experts --help`");
    const Result far = run(train_with({"--quite-another"}));
    expect_refused(far, "there is no flag \"--quite-another\"");
    EXPECT_EQ(far.errors.find("--batch"), std::string::npos) << "no list of all flags";
}

TEST_F(CommandLine, PresetsCanBePrintedAndReadBack) {
    std::istringstream names(run({"config", "--list"}).out);
    std::size_t count = 0;
    for (std::string name; std::getline(names, name); ++count) {
        const Result dump = run({"config", "--dump", name});
        ASSERT_EQ(dump.code, 0) << dump.errors;
        const RunConfig preset = load_run_config(name);
        const RunConfig again = load_run_config(folder.write(name + ".toml", dump.out).string());
        EXPECT_TRUE(again.model == preset.model && again.train == preset.train) << dump.out;
        // Every key has its comment.
        std::istringstream lines(dump.out);
        std::string before;
        for (std::string line; std::getline(lines, line); before = line)
            if (line.find(" = ") != std::string::npos && !line.starts_with("#")) {
                EXPECT_TRUE(before.starts_with("# ")) << line;
            }
    }
    EXPECT_GE(count, 3u);
    expect_refused(run({"config"}), "--dump");
    expect_refused(run({"config", "--dump", "tyni"}), "tyni");
}

TEST_F(CommandLine, InfoCountsParameters) {
    const Result text = run({"info", "--model", "v3-671b"});
    EXPECT_EQ(text.code, 0);
    EXPECT_NE(text.out.find("671026419200"), std::string::npos) << text.out;
    const Result json = run({"info", "--json", "--model", "v3-671b"});
    EXPECT_NE(json.out.find("\"parameters\": 671026419200"), std::string::npos) << json.out;
    expect_refused(run({"info", "--model", "v4"}), "v4");
    expect_refused(run({"info"}), "--model");
}

TEST_F(CommandLine, SchedulesNeedNoDevice) {
    const Result result = run({"schedule", "--kind", "1f1b", "--ranks", "2", "--micro-batches", "3",
                               "--costs", "f=1,i=2,w=3"});
    EXPECT_EQ(result.code, 0) << result.errors;
    EXPECT_NE(result.out.find("rank 0: F0 F0 B0 F0 B0 B0\nrank 1: F0 B0 F0 B0 F0 B0\n"),
              std::string::npos)
        << result.out;
    EXPECT_NE(result.out.find("step time 24, bubble 6 (25.0 %)"), std::string::npos) << result.out;
    expect_refused(run({"schedule", "--kind", "dualpipe", "--ranks", "3"}), "even number of ranks");
    expect_refused(run({"schedule", "--kind", "1f1b", "--ranks", "-1"}), "--ranks");
    expect_refused(run({"schedule"}), "--compare");
    const Result pair = run({"schedule", "--pair", "--layers", "2", "--costs", "dispatch.f=1",
                             "--order", "MLP(B) MLP(W) MLP(F) ATTN(B) ATTN(W) ATTN(F)"});
    EXPECT_EQ(pair.code, 0) << pair.errors;
    EXPECT_NE(pair.out.find("given order, round after round:\nMLP(B) MLP(W) MLP(F)"),
              std::string::npos)
        << pair.out;
    expect_refused(run({"schedule", "--pair", "--kind", "1f1b"}), "--pair");
    expect_refused(run({"schedule", "--pair", "--order", "MPL(B)"}), "there is no \"MPL(B)\"");
    expect_refused(run({"schedule", "--kind", "1f1b", "--layers", "2"}), "--pair");
}

TEST_F(CommandLine, ResumeTakesTheCheckpointsConfiguration) {
    RunConfig config = load_run_config("tiny");
    config.train.data = {data};
    config.train.seed = 42;
    config.train.lr = 0.25;
    write_checkpoint(10, to_toml(config));
    const std::string old = (folder.path() / "old").string();
    const Result result = run({"train", "--resume", old, "--steps", "20"});
    ASSERT_EQ(result.code, 0) << result.errors;
    EXPECT_EQ(result.train->resume, folder.path() / "old" / "checkpoints" / "step-10");
    EXPECT_EQ(result.train->out, folder.path() / "old");
    EXPECT_EQ(result.train->config.train.seed, 42u);
    EXPECT_EQ(result.train->config.train.lr, 0.25);
    EXPECT_EQ(result.train->config.train.steps, 20u);
    const std::string other = (folder.path() / "other").string();
    const Result moved = run({"train", "--resume", old, "--steps", "20", "--out", other});
    ASSERT_EQ(moved.code, 0) << moved.errors;
    EXPECT_EQ(moved.train->out, other);

    expect_refused(run({"train", "--resume", old, "--steps", "10"}), "10 steps");
    expect_refused(run({"train", "--resume", old + "x", "--steps", "20"}), "no checkpoint");
    expect_refused(run({"train", "--resume", old, "--config", "v2-lite", "--steps", "20"}),
                   "another shape");
    expect_refused(run({"train", "--config", "tiny", "--data", data, "--out", old}),
                   "already holds a run");
}

// A shell completes the folder's name with a slash.
TEST_F(CommandLine, PipelinesGetMicroBatchesWhateverTheRunGoesOnFrom) {
    const std::vector<std::string> two = {"--ranks", "2", "--pp", "2"};
    const auto micro_batches = [](const Result& result) {
        EXPECT_TRUE(result.train) << result.errors;
        return result.train ? result.train->config.train.micro_batches : 0;
    };
    const auto with = [&](std::vector<std::string> more) {
        more.insert(more.end(), two.begin(), two.end());
        return more;
    };
    ::setenv("OMPI_COMM_WORLD_RANK", "0", 1); // as a rank, so that none are started
    ::setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    EXPECT_EQ(micro_batches(run(train_with(two))), 4u);
    EXPECT_EQ(micro_batches(run(train_with(with({"--micro-batches", "1"})))), 1u);
    const fs::path checkpoint = write_checkpoint(5, to_toml(load_run_config("tiny")));
    EXPECT_EQ(micro_batches(
                  run(with({"train", "--resume", checkpoint.string(), "--config", "tiny", "--data",
                            data, "--steps", "10", "--out", (folder.path() / "again").string()}))),
              4u);
    ::unsetenv("OMPI_COMM_WORLD_RANK");
    ::unsetenv("OMPI_COMM_WORLD_SIZE");
}

TEST_F(CommandLine, ResumeFindsTheRunHoweverTheCheckpointIsTyped) {
    RunConfig config = load_run_config("tiny");
    config.train.data = {data};
    const fs::path checkpoint = write_checkpoint(10, to_toml(config));
    const std::string old = (folder.path() / "old").string();
    for (const std::string& typed :
         {checkpoint.string() + "/", checkpoint.string() + "/.", old + "/"}) {
        for (const bool with_out : {false, true}) {
            std::vector<std::string> arguments = {"train", "--resume", typed, "--steps", "20"};
            if (with_out) {
                arguments.insert(arguments.end(), {"--out", old});
            }
            const Result result = run(arguments);
            ASSERT_EQ(result.code, 0) << typed << result.errors;
            EXPECT_EQ(result.train->out, folder.path() / "old") << typed;
        }
    }
    // A copy belongs to no run.
    const fs::path copy = folder.path() / "copy" / "model";
    fs::create_directories(copy.parent_path());
    fs::copy(checkpoint, copy, fs::copy_options::recursive);
    expect_refused(run({"train", "--resume", copy.string(), "--steps", "20"}), "give --out");
    const std::string other = (folder.path() / "other").string();
    EXPECT_EQ(run({"train", "--resume", copy.string(), "--steps", "20", "--out", other}).code, 0);
}

TEST_F(CommandLine, DamagedCheckpointsAreRefused) {
    RunConfig config = load_run_config("tiny");
    config.train.data = {data};
    const fs::path checkpoint = write_checkpoint(10, to_toml(config));
    const std::string good = content_of(checkpoint / "model.safetensors");
    const std::vector<std::string> resume = {"train", "--resume", (folder.path() / "old").string(),
                                             "--steps", "20"};
    const auto write = [&](const std::string& content) {
        folder.write("old/checkpoints/step-10/model.safetensors", content);
    };
    write(good.substr(0, good.size() - 1));
    expect_refused(run(resume), "model.safetensors");
    std::string bad = good;
    bad.back() = 'x'; // tensor data: only its sum tells
    write(bad);
    expect_refused(run(resume), "check sum");
    write(good);
    EXPECT_EQ(run(resume).code, 0);
}

TEST_F(CommandLine, GenerateOpensTheNewestCheckpoint) {
    RunConfig config = load_run_config("tiny");
    config.train.data = {data};
    write_checkpoint(9, to_toml(config));
    write_checkpoint(10, to_toml(config));
    const std::string old = (folder.path() / "old").string();
    const Result result = run({"generate", "--checkpoint", old, "--prompt", "Hello, ", "--tokens",
                               "50", "--temperature", "0", "--seed", "3"});
    ASSERT_EQ(result.code, 0) << result.errors;
    EXPECT_EQ(result.generate->checkpoint.filename(), "step-10");
    EXPECT_EQ(result.generate->prompts, std::vector<std::string>{"Hello, "});
    EXPECT_EQ(result.generate->text.tokens, 50u);
    EXPECT_EQ(result.generate->text.sampling.temperature, 0);
    EXPECT_EQ(result.generate->text.sampling.seed, 3u);
    EXPECT_TRUE(result.generate->config.model == config.model);
    expect_refused(run({"generate", "--checkpoint", old, "--prompt", "x"}), "--tokens");
    expect_refused(run({"generate", "--checkpoint", data, "--prompt", "x", "--tokens", "5"}),
                   "no checkpoint");
    expect_refused(run({"generate", "--checkpoint", old, "--prompt", "x", "--tokens", "0"}),
                   "--tokens");
}

TEST_F(CommandLine, RanksAreStartedAndTheirLossIsNamed) {
    const fs::path out = folder.path() / "run";
    const Result good = run(train_with({"--ranks", "2"}));
    EXPECT_EQ(good.code, 0) << good.errors;
    EXPECT_FALSE(good.train) << "the launching process does not train";
    EXPECT_EQ(content_of(out.string() + ".rank-0"), "2");
    EXPECT_EQ(content_of(out.string() + ".rank-1"), "2");
    EXPECT_NE(content_of(out / "config.toml").find("dp = 2"), std::string::npos);
    const Result lost = run(train_with({"--ranks", "2", "--seed", "666"}));
    EXPECT_EQ(lost.code, 4);
    EXPECT_EQ(lost.errors, "bellows: rank 0: the peer 1 went\n");
    const Result silent = run(train_with({"--ranks", "2", "--seed", "667"}));
    EXPECT_EQ(silent.code, 4) << "also if the survivor saw nothing";
    EXPECT_NE(silent.errors.find("rank 1"), std::string::npos) << silent.errors;
}

TEST_F(CommandLine, UnderMpirunTheNumbersMustAgree) {
    ::setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    ::setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    EXPECT_EQ(run(train_with({})).train.value().layout, (RunLayout{1, 4, 4}));
    expect_refused(run(train_with({"--ranks", "2"})), "started 4");
    ::setenv("OMPI_COMM_WORLD_RANK", "3", 1);
    const Result quiet = run(train_with({"--ranks", "2"}));
    EXPECT_EQ(quiet.code, 2);
    EXPECT_EQ(quiet.errors, "") << "one line from all ranks together";
    ::unsetenv("OMPI_COMM_WORLD_SIZE");
    ::unsetenv("OMPI_COMM_WORLD_RANK");
}

int main(int argc, char** argv) {
    if (std::getenv("BELLOWS_LAUNCH_SOCKET") != nullptr) {
        Commands commands;
        commands.train = train_as_rank;
        return run_command_line(argc, argv, commands);
    }
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
