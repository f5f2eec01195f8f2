// SPDX-License-Identifier: MIT
#include "app/command_line.hpp"

#include "app/commands.hpp"
#include "app/exit_code.hpp"
#include "app/progress.hpp"
#include "app/relaunch.hpp"
#include "app/stop_signal.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/version.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/comm/phase.hpp>
#include <bellows/engine/device_choice.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

namespace bellows {

namespace {

constexpr const char* kTrainExamples = R"(
Examples:
  bellows train --config tiny --data /usr/share/common-licenses --ranks 4 --steps 400 --out runs/demo
  bellows train --resume runs/demo --steps 800
  bellows train --resume runs/demo/checkpoints/step-200 --steps 800
  mpirun -n 8 bellows train --config my.toml --data corpus/ --steps 1000 --pp 2 --out runs/a

The configuration has a [model] and a [train] table; flags override it, and config.toml in the
run's folder says what the run used. A run whose estimated memory does not fit is refused.

Ctrl-C (SIGINT) or SIGTERM ends the step, writes a checkpoint and exits with code 5; a second one
ends the run at once. Under your own mpirun or srun, SIGUSR1 to any rank does that.

A run that goes on from another than its newest checkpoint keeps the newer ones as
checkpoints/step-N.abandoned, unless --out names another folder.

The run's folder gets metrics.jsonl with a line per step: step, loss (nats per token), grad_norm
(before clipping), lr, tokens_per_s, seconds, model_flops_per_s, bytes_exchanged (sent by all ranks
together) and seconds_waited (for other ranks: what exchange, reductions, pipes and host collectives
of a rank did nothing but wait, added up, mean over the ranks; they run side by side, so the sum may
exceed `seconds`). Also loss.svg, trace.json (the last two steps of all ranks, each piece of work
with its op of the schedule; opens in Perfetto), of several ranks report.svg (how the last step went
through their pipeline), and checkpoints/step-N.)";

constexpr const char* kGenerateExamples = R"(
Examples:
  bellows generate --checkpoint runs/demo --prompt "This license " --tokens 300
  bellows generate --checkpoint runs/demo/checkpoints/step-400 --prompt "" --tokens 50 --temperature 0)";

constexpr const char* kInfoExamples = R"(
Examples:
  bellows info
  bellows info --json --device 0
  bellows info --kernels --device gpu
  bellows info --model tiny
  bellows info --model my.toml

--kernels times each way of computing FP8 products that a device has, at sizes of decoding and of
training, and then in other tiles, which give the same bits; that takes up to a minute once, and is
kept in the user's cache folder for all devices of one name. Runs take the fastest variant whose
bits are those of the usual one, and their checkpoints keep the choice; with
BELLOWS_FP8_VARIANTS=measured they take the fastest, with =decoded one that every device has. Tiles
are not part of the choice: each device takes those that were fastest there. Linear layers in bf16
take the direct variant on GPUs with matrix units of bf16; BELLOWS_BF16_VARIANTS=decoded (products
through workgroup memory), =direct or =measured say otherwise, and checkpoints keep that choice.)";

constexpr const char* kSelftestExamples = R"(
Checks every codec and op against f64 arithmetic on the host, the expert exchange on one rank and on
two, and that a small training run gives the same bits however its work is ordered. error/bound is
the largest error in units of what rounding allows; above 1 is wrong. Under mpirun or srun, exchange
and training are checked among the ranks that are there.

Examples:
  bellows selftest
  bellows selftest --device gpu --json selftest.json
  mpirun -n 4 bellows selftest)";

constexpr const char* kScheduleExamples = R"(
Text is one line per rank: F forward, B backward, I and W its halves, the gradients of inputs and of
weights, with the rank's chunk (phase) behind them; F0&B1 is a pair that may overlap. Below stand
the simulated step time, the bubble (what a rank idles) and how many chunks' activations each rank
keeps. svg is a picture, trace opens in ui.perfetto.dev, json has all of it.

Costs are per op of a chunk: f, i, w, fb of a pair (unless given f + i + w), p2p until a message is
there, transfer while it takes its link. With --compare they are of a rank's share of the model, of
which a chunk costs its part.

--pair shows what one of DualPipe's pairs hides: the forward of one micro-batch and the backward of
another, MoE layers both, whose nodes alternate so that the tokens of one travel while the other
computes. Costs are then of nodes: attn, router, dispatch, shared, mlp and combine with .f for the
forward and .b for the gradients of inputs; attn.w, shared.w and mlp.w for those of weights. Without
a cost, gradients take what the forward takes, and exchanges together as long as all that computes.
--order is the order of a pair of layers, repeated: each name hands in the nodes up to the next one
of that name.

Kinds: gpipe, 1f1b, interleaved (a multiple of as many micro-batches as ranks), zb-h1, zb-h2, zb-v,
dualpipe (an even number of ranks and of micro-batches, at least twice as many as ranks), dualpipev
(at least twice as many micro-batches as ranks).

Examples:
  bellows schedule --kind dualpipe --ranks 8 --micro-batches 20
  bellows schedule --kind zb-v --ranks 4 --micro-batches 12 --format svg --out zb-v.svg
  bellows schedule --compare --ranks 8 --micro-batches 32 --costs f=10,i=11,w=9,fb=25,p2p=0.5
  bellows schedule --kind 1f1b --ranks 2 --micro-batches 4 --costs f=1,i=1,w=1:f=2,i=2,w=1
  bellows schedule --pair --costs attn.f=2,mlp.f=1,dispatch.f=1.5,mlp.w=0.8
  bellows schedule --pair --layers 2 --order 'MLP(B) MLP(W) MLP(F) ATTN(B) ATTN(W) ATTN(F)'
  bellows schedule --pair --format svg --out pair.svg)";

constexpr const char* kExitCodes =
    "\n\nExit codes: 0 good, 1 wrong result, 2 bad input or usage, 3 no device that serves, "
    "4 a peer was lost, 5 stopped by a signal and saved, 6 the last checkpoint could not be "
    "written, 7 the gradient or the loss stays non-finite.";

/// CLI11 would wrap "-4" around to a huge number.
std::string check_count(const std::string& text) {
    constexpr std::size_t kMostDigits = 19;
    const bool digits = !text.empty() && text.size() <= kMostDigits &&
                        text.find_first_not_of("0123456789") == std::string::npos;
    return digits ? "" : "must be a whole number of at least 0, not " + in_quotes(text);
}

/// "list" prints the devices instead of running; a name that none can have is refused with them.
void add_device(CLI::App& app, std::optional<std::string>& device, const std::string& what) {
    const auto take = [&device](const std::string& text) {
        if (text == "list")
            throw CLI::CallForVersion(device_table(), 0);
        try {
            (void)parse_devices(text);
        } catch (const Error& error) {
            throw Error(error.code(), error.message() + "; devices here: " + device_names());
        }
        device = text;
    };
    app.add_option_function<std::string>("--device", take, what)
        ->type_name("INDEX|UUID|any|gpu|cpu|list");
}

CLI::Option* add_count(CLI::App& app, const char* flag, std::optional<std::uint64_t>& value,
                       const char* what) {
    return app.add_option(flag, value, what)->check(CLI::Validator(check_count, "", ""));
}

void add_train(CLI::App& app, TrainFlags& flags) {
    app.add_option("--config", flags.config, "configuration file or preset")
        ->type_name("FILE|PRESET");
    app.add_option("--data", flags.data, "text files and folders")
        ->type_name("PATH")
        ->expected(1, -1);
    add_count(app, "--ranks", flags.ranks,
              "processes to train on; started here unless mpirun or "
              "srun started this one (default 1)");
    add_count(app, "--steps", flags.steps, "steps in total, resumed ones included");
    app.add_option("--out", flags.out, "folder of the run (--resume: where it is resumed)")
        ->type_name("DIR");
    app.add_option("--resume", flags.resume,
                   "a run's folder (its newest checkpoint) or one "
                   "checkpoint")
        ->type_name("DIR");
    add_count(app, "--dp", flags.dp, "data-parallel ranks (default: ranks / pp)");
    add_count(app, "--ep", flags.ep,
              "ranks that share one set of experts, a divisor of dp "
              "(default: dp)");
    add_count(app, "--pp", flags.pp, "ranks of the pipeline (default 1)");
    app.add_option("--pipeline", flags.pipeline,
                   "its schedule (default 1f1b); `bellows schedule --compare` shows them")
        ->type_name("gpipe|1f1b|interleaved|zb-h1|zb-h2|zb-v|dualpipe|dualpipev");
    app.add_option("--pairs", flags.pairs,
                   "how dualpipe's and dualpipev's pairs run: interleaved as measured where "
                   "experts' tokens travel, else apart (auto, the default), apart, or a pattern as "
                   "`bellows schedule --pair` prints it")
        ->type_name("auto|apart|PATTERN");
    add_count(app, "--batch", flags.batch, "sequences per step, over all ranks");
    add_count(app, "--micro-batches", flags.micro_batches,
              "per data-parallel rank (default: as configured; where that is 1 and --pp more, the "
              "fewest from twice --pp on that divide the batch)");
    add_count(app, "--seq", flags.seq, "tokens per sequence");
    app.add_option("--lr", flags.lr, "learning rate");
    add_count(app, "--seed", flags.seed, "of the weights and of the order of the data");
    app.add_option("--precision", flags.precision,
                   "how activations are stored; fp8: with FP8 linear layers")
        ->type_name("f32|bf16|fp8");
    add_device(
        app, flags.device,
        "any, gpu, cpu, an index or a UUID; several with commas between: the ranks of a host "
        "take them in turn; list: show them and end (default: as configured, or else any: the one "
        "that BELLOWS_DEVICE names, or the best, of several GPUs of its name another for each rank "
        "of a host)");
    app.add_option(
           "--device-link", flags.device_link,
           "auto: tokens, activations and gradients go from device to device where a vendor's "
           "driver links those of a host (default); off: through the host's memory; host: for CPU "
           "devices")
        ->type_name("auto|off|host");
    add_count(app, "--checkpoint-every", flags.checkpoint_every,
              "steps between checkpoints (default: one every checkpoint_minutes of [train], 10 "
              "minutes); one is always written at the end");
    app.footer(std::string(kTrainExamples) + kExitCodes);
}

void add_generate(CLI::App& app, GenerateFlags& flags) {
    app.add_option("--checkpoint", flags.checkpoint,
                   "a run's folder (its newest checkpoint) or one checkpoint")
        ->type_name("DIR")
        ->required();
    app.add_option("--prompt", flags.prompt, "text to continue")->required();
    add_count(app, "--tokens", flags.tokens, "to write after the prompt")->required();
    app.add_option("--temperature", flags.temperature,
                   "0: always the likeliest token (default 0.8)")
        ->check(CLI::Range(0.0, 100.0));
    add_count(app, "--seed", flags.seed, "of the draws (default 1)");
    app.add_option("--data", flags.data,
                   "say on standard error which share of the written words stands in these files "
                   "and folders")
        ->type_name("PATH")
        ->expected(1, -1);
    add_device(app, flags.device, "where to run (default: as the run was); list: show the devices");
    app.footer(std::string(kGenerateExamples) + kExitCodes);
}

void add_schedule(CLI::App& app, ScheduleFlags& flags) {
    app.add_option("--kind", flags.kind, "which schedule")->type_name("KIND");
    app.add_flag("--compare", flags.compare, "all kinds, for the same ranks and model");
    app.add_flag("--pair", flags.pair, "a forward beside a backward, node by node");
    add_count(app, "--ranks", flags.ranks, "pipeline ranks (default 4)");
    add_count(app, "--micro-batches", flags.micro_batches,
              "of both directions together (default: four times as many as ranks)");
    add_count(app, "--chunks", flags.chunks, "interleaved: stages per rank (default 2)");
    app.add_option("--costs", flags.costs,
                   "how long ops take (default f=1,i=1,w=1,p2p=0); of each stage with ':' between; "
                   "--pair: nodes (default attn.f=1,router.f=0.1,shared.f=0.3,mlp.f=1)")
        ->type_name("f=1,i=1,w=1,fb=3,p2p=0,transfer=0|attn.f=1,mlp.b=1");
    app.add_flag("--decoupled", flags.decoupled,
                 "a pair's halves run one after the other, each as soon as it can");
    app.add_flag(
        "--early-gradients", flags.early_gradients,
        "a backward sends its input's gradient before it makes the weights'; those of pairs only "
        "with --decoupled");
    add_count(app, "--layers", flags.layers, "--pair: how many of both (default 4)");
    app.add_option("--order", flags.order, "--pair: that order (default: the best that is found)")
        ->type_name("NAMES");
    app.add_option("--format", flags.format, "how to show it (default text)")
        ->type_name("text|json|svg|trace");
    app.add_option("--out", flags.out, "write it there (default: standard output)")
        ->type_name("FILE");
    app.footer(std::string(kScheduleExamples) + kExitCodes);
}

/// For a process to end once its work is done.
constexpr std::chrono::seconds kEndLimit{20};

/// In the environment of ranks whose launching process has checked their input.
constexpr const char* kCheckedVariable = "BELLOWS_INPUT_CHECKED";

bool is_first_rank() {
    return !is_launched() || launched_rank() <= 0;
}

/// Whether it is this process that tells a person of an error. Where our launcher started the
/// ranks, it tells. Else the first rank does as long as the ranks only read their input, which is
/// the same for all; and then the rank that the error is about, or for a lost one the first other.
bool tells(const Error& error, bool input_is_good) {
    if (has_launcher()) {
        return false;
    }
    if (!is_launched() || !input_is_good) {
        return is_first_rank();
    }
    const int rank = launched_rank();
    const bool lost = error.code() == ErrorCode::PeerLost || error.code() == ErrorCode::Timeout;
    const bool about_this = error.rank() < 0 || error.rank() == rank;
    return about_this || (lost && rank == (error.rank() == 0 ? 1 : 0));
}

/// One line; with this rank in front unless it names one already.
std::string line_of(const Error& error, bool input_is_good) {
    std::string text = error.message();
    for (std::size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at)) {
        const std::size_t end = std::min(text.find_first_not_of(" \n", at), text.size());
        const bool opens = at > 0 && text[at - 1] == ':';
        text.replace(at, end - at, end == text.size() ? "" : opens ? " " : "; ");
    }
    const bool named = text.starts_with("rank ");
    return is_launched() && input_is_good && !named
               ? "rank " + std::to_string(launched_rank()) + ": " + text
               : text;
}

/// Starts this very command once per rank, and tells what ended the first that failed.
int start_ranks(int ranks, int argc, const char* const* argv) {
    ::setenv(kCheckedVariable, "1", 1);
    ::setenv(kTerminalVariable, ProgressReporter::terminal_of(stdout).c_str(), 1);
    const LaunchResult result =
        relaunch(ranks, std::vector<std::string>(argv + 1, argv + argc), /*can_stop=*/true);
    // Rank 0 has said what the ends of a run mean.
    const bool told = result.exit_code == kExitStopped || result.exit_code == kExitNotSaved;
    if (result.exit_code != 0 && !told) {
        std::fprintf(stderr, "bellows: %s\n", reason_of(result).c_str());
    }
    return result.exit_code;
}

int train(const TrainFlags& flags, int argc, const char* const* argv, const Commands& commands,
          bool& input_is_good) {
    const TrainOptions options = resolve_train(flags);
    if (is_first_rank() && std::getenv(kCheckedVariable) == nullptr) {
        check_training_input(options);
    }
    if (options.ranks() > 1 && !is_launched()) {
        return start_ranks(static_cast<int>(options.ranks()), argc, argv);
    }
    input_is_good = true;
    watch_stop_signals();
    return commands.train(options);
}

/// The subcommands that exist, and what was typed for them.
struct CommandLine {
    CLI::App app{"Bellows trains and runs mixture-of-experts language models on any Vulkan device.",
                 "bellows"};
    CLI::App* info = nullptr;
    CLI::App* schedule = nullptr;
    CLI::App* selftest = nullptr; // from here on null if they do not exist
    CLI::App* train = nullptr;
    CLI::App* generate = nullptr;
    InfoFlags info_flags;
    SelftestOptions selftest_options;
    std::optional<std::string> selftest_device;
    TrainFlags train_flags;
    GenerateFlags generate_flags;
    ScheduleFlags schedule_flags;

    explicit CommandLine(const Commands& commands) {
        app.set_version_flag("--version", kVersion);
        app.require_subcommand(1);
        // Scripts with flags of their own let "$@" follow; subcommands inherit this.
        app.option_defaults()->take_last();
        app.footer(
            "\n`bellows COMMAND --help` says more, with examples. Of a flag that is given twice "
            "the last one counts; --data collects.");
        info = app.add_subcommand("info", commands.info ? "devices, or the size of a model"
                                                        : "the size of a model");
        info->add_option("--model", info_flags.model,
                         "count the parameters of a configuration file or preset")
            ->type_name("PRESET|FILE")
            ->required(!commands.info);
        info->add_flag("--json", info_flags.json, "as JSON");
        if (commands.info) {
            info->add_flag("--kernels", info_flags.kernels,
                           "how each kind of FP8 product is computed, and how fast; measured once");
            info->add_flag("--retune", info_flags.retune, "with --kernels: measure again");
        }
        add_device(*info, info_flags.device, "this device alone; list: a line per device");
        info->footer(std::string(kInfoExamples) + kExitCodes);
        if (commands.selftest) {
            selftest = app.add_subcommand("selftest", "check this device in under two minutes");
            selftest->add_option("--json", selftest_options.json, "write the report there as well")
                ->type_name("FILE");
            add_device(*selftest, selftest_device,
                       "the device to check (default: the best); list: show the devices");
            selftest->footer(std::string(kSelftestExamples) + kExitCodes);
        }
        if (commands.train) {
            train = app.add_subcommand("train", "train a model on text");
            add_train(*train, train_flags);
        }
        if (commands.generate) {
            generate = app.add_subcommand("generate", "write text with a trained model");
            add_generate(*generate, generate_flags);
        }
        schedule = app.add_subcommand("schedule", "pipeline schedules: ops, times, pictures");
        add_schedule(*schedule, schedule_flags);
    }

    bool chosen(const CLI::App* command) const { return command != nullptr && command->parsed(); }
};

int run_subcommand(int argc, const char* const* argv, const Commands& commands,
                   bool& input_is_good) {
    CommandLine line(commands);
    const auto is_first = [&](const CLI::App* command) { return command->get_name() == argv[1]; };
    const std::vector<CLI::App*> all = line.app.get_subcommands([](CLI::App*) { return true; });
    if (argc > 1 && argv[1][0] != '-' && std::none_of(all.begin(), all.end(), is_first)) {
        throw Error(ErrorCode::InvalidArgument,
                    "there is no command " + in_quotes(argv[1]) + "; `bellows --help` lists them");
    }
    try {
        line.app.parse(argc, argv);
    } catch (const CLI::Success& help) {
        if (is_first_rank()) {
            line.app.exit(help);
        }
        return kExitGood;
    } catch (const CLI::ParseError& error) {
        std::string command = "bellows";
        for (const CLI::App* used : line.app.get_subcommands()) {
            command += " " + used->get_name();
        }
        throw Error(ErrorCode::InvalidArgument,
                    std::string(error.what()) + "; `" + command + " --help` lists the flags");
    }
    if (line.chosen(line.info)) {
        return line.info_flags.model ? print_model_info(line.info_flags)
                                     : commands.info(resolve_info(line.info_flags));
    }
    if (line.chosen(line.selftest)) {
        input_is_good = true;
        line.selftest_options.device = line.selftest_device.value_or(kAnyDevice);
        return commands.selftest(line.selftest_options);
    }
    if (line.chosen(line.schedule)) {
        return is_first_rank() ? print_schedule(resolve_schedule(line.schedule_flags)) : kExitGood;
    }
    if (line.chosen(line.generate)) {
        return commands.generate(resolve_generate(line.generate_flags));
    }
    return train(line.train_flags, argc, argv, commands, input_is_good);
}

} // namespace

int run_command_line(int argc, const char* const* argv, const Commands& commands) {
    // A full disk, a quota or a reader that went away are errors of the call that met them.
    std::signal(SIGXFSZ, SIG_IGN);
    std::signal(SIGPIPE, SIG_IGN);
    if (is_launched()) {
        report_alive(launched_rank());
    }
    bool input_is_good = false; // from then on, every rank speaks for itself
    int code = kExitGood;
    std::optional<Error> failure;
    try {
        code = run_subcommand(argc, argv, commands, input_is_good);
    } catch (const Error& error) {
        failure = error;
    } catch (const std::bad_alloc&) {
        failure.emplace(ErrorCode::OutOfMemory, "out of host memory");
    } catch (const std::exception& error) {
        failure.emplace(ErrorCode::Internal, std::string("internal error: ") + error.what());
    }
    std::fflush(stdout);
    std::string message;
    if (failure) {
        code = exit_code_of(failure->code());
        message = line_of(*failure, input_is_good);
        if (tells(*failure, input_is_good)) {
            std::fprintf(stderr, "bellows: %s\n", message.c_str());
        }
    }
    if (is_launched()) {
        report_exit(launched_rank(), code, message);
        begin_phase(launched_rank(), "after the end of its work", kEndLimit);
    }
    return code;
}

} // namespace bellows
