// SPDX-License-Identifier: MIT
#include "app/options/option_table.hpp"

#include "app/options/help.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/version.hpp>
#include <bellows/engine/device_choice.hpp>

#include <memory>

namespace bellows {

namespace {

/// CLI11 would wrap "-4" around to a huge number.
std::string check_count(const std::string& text) {
    constexpr std::size_t kMostDigits = 19;
    const bool digits = !text.empty() && text.size() <= kMostDigits &&
                        text.find_first_not_of("0123456789") == std::string::npos;
    return digits ? "" : "must be a whole number of at least 0, not " + in_quotes(text);
}

/// The next flags stand under this heading.
void group(CLI::App& app, const char* heading) {
    app.option_defaults()->group(heading);
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

void add_train_input(CLI::App& app, TrainFlags& flags) {
    group(app, "Input");
    app.add_option("--config", flags.config, "configuration file or preset")
        ->type_name("FILE|PRESET");
    app.add_option("--data", flags.data, "text files and folders")
        ->type_name("PATH")
        ->expected(1, -1);
    app.add_option("--tokenizer", flags.tokenizer,
                   "how text becomes tokens: bytes, or a tokenizer's file or folder (default: as "
                   "configured)")
        ->type_name("PATH|bytes");
    app.add_option("--holdout", flags.holdout,
                   "share of the text, at its end, that is kept out of training (default: as "
                   "configured, or else 0)");
    app.add_option("--init", flags.init,
                   "a Hugging Face folder whose weights are the first ones; the model is its, "
                   "--config gives the rest")
        ->type_name("DIR");
    app.add_option("--resume", flags.resume,
                   "a run's folder (its newest checkpoint) or one checkpoint")
        ->type_name("DIR");
    app.add_flag("--fall-back", flags.fall_back,
                 "with --resume: where the checkpoint is damaged, go on from the next older whole "
                 "one");
    app.add_option("--set", flags.set,
                   "set a key of the configuration to a TOML value: --set train.lr=1e-3, --set "
                   "model.layers=4; may be repeated, other flags go before it")
        ->type_name("KEY=VALUE")
        ->expected(1, -1)
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void add_train_layout(CLI::App& app, TrainFlags& flags) {
    group(app, "Layout");
    add_count(app, "--ranks", flags.ranks,
              "processes to train on; started here unless mpirun or srun started this one "
              "(default 1)");
    add_count(app, "--pp", flags.pp, "ranks of the pipeline (default 1)");
    add_count(app, "--dp", flags.dp, "data-parallel ranks (default: ranks / pp)");
    add_count(app, "--ep", flags.ep,
              "ranks that share one set of experts, a divisor of dp (default: dp)");
    add_count(app, "--eplb-every", flags.eplb_every,
              "steps from one placement of the experts by their loads (EPLB) to the next (default "
              "0: they stay where they are)");
    add_count(app, "--eplb-slots", flags.eplb_slots,
              "slots of each layer on all ranks of --ep together; those beyond the number of "
              "experts are for replicas (default: as many as experts)");
    app.add_option("--pipeline", flags.pipeline,
                   "its schedule (default 1f1b); `bellows schedule --compare` shows them")
        ->type_name("gpipe|1f1b|interleaved|zb-h1|zb-h2|zb-v|dualpipe|dualpipev");
    app.add_option("--pairs", flags.pairs,
                   "how dualpipe's and dualpipev's pairs run: interleaved as measured where "
                   "experts' tokens travel, else apart (auto, the default), apart, or a pattern as "
                   "`bellows schedule --pair` prints it")
        ->type_name("auto|apart|PATTERN");
}

void add_train(CLI::App& app, TrainFlags& flags) {
    add_train_input(app, flags);
    group(app, "Training");
    add_count(app, "--steps", flags.steps, "steps in total, resumed ones included");
    add_count(app, "--batch", flags.batch, "sequences per step, over all ranks");
    add_count(app, "--micro-batches", flags.micro_batches,
              "per data-parallel rank (default: as configured; where that is 1 and --pp more, the "
              "fewest from twice --pp on that divide the batch)");
    add_count(app, "--seq", flags.seq, "tokens per sequence");
    app.add_option("--lr", flags.lr, "the highest learning rate");
    add_count(app, "--warmup", flags.warmup, "steps in which the learning rate rises to --lr");
    add_count(app, "--decay", flags.decay,
              "step at which the learning rate has fallen to lr_min, along a cosine unless "
              "lr_schedule in [train] says otherwise; 0: it stays");
    add_count(app, "--seed", flags.seed, "of the weights and of the order of the data");
    app.add_option("--precision", flags.precision,
                   "how activations are stored; fp8: with FP8 linear layers")
        ->type_name("f32|bf16|fp8");
    add_train_layout(app, flags);
    group(app, "Output");
    app.add_option("--out", flags.out, "folder of the run (--resume: where it is resumed)")
        ->type_name("DIR");
    add_count(app, "--checkpoint-every", flags.checkpoint_every,
              "steps between checkpoints (default: one every checkpoint_minutes of [train], 10 "
              "minutes); one is always written at the end");
    add_count(app, "--eval-every", flags.eval_every,
              "steps from one look at the loss of held-out text to the next (default 0: at the end "
              "only)");
    app.add_flag("--tensorboard", flags.tensorboard,
                 "write an event file of TensorBoard beside metrics.jsonl");
    group(app, "Device");
    add_device(
        app, flags.device,
        "any, gpu, cpu, an index or a UUID; several with commas between: the ranks of a host "
        "take them in turn; list: show them and end (default: as configured, or else any: the one "
        "that BELLOWS_DEVICE names, or the best, of several GPUs of its name another for each rank "
        "of a host)");
    app.add_option("--peak-tflops", flags.peak_tflops,
                   "what a rank's device could do at most, to which the model FLOPs per second are "
                   "compared (default: measured at the start, on GPUs)");
    app.add_option(
           "--device-link", flags.device_link,
           "auto: tokens, activations and gradients go from device to device where a vendor's "
           "driver links those of a host (default); off: through the host's memory; host: for CPU "
           "devices")
        ->type_name("auto|off|host");
    app.footer(kTrainHelp);
}

void add_model(CLI::App& app, GenerateFlags& flags) {
    group(app, "Input");
    app.add_option("--checkpoint", flags.checkpoint,
                   "a run's folder (its newest checkpoint), one checkpoint, or a Hugging Face "
                   "folder")
        ->type_name("DIR")
        ->required();
    app.add_option("--tokenizer", flags.tokenizer,
                   "bytes, or a tokenizer's file or folder (default: the checkpoint's own)")
        ->type_name("PATH|bytes");
    app.add_option("--system", flags.system, "what a system message says, in front of a user's")
        ->type_name("TEXT");
}

void add_number(CLI::App& app, const char* name, std::optional<double>& value, const char* what) {
    app.add_option(name, value, what)->type_name("NUMBER");
}

/// How tokens are chosen, and how the model runs.
void add_writing(CLI::App& app, GenerateFlags& flags) {
    add_number(app, "--temperature", flags.temperature,
               "0: always the likeliest token (default 0.8)");
    add_count(app, "--seed", flags.seed, "of the draws (default 1)");
    add_count(app, "--top-k", flags.top_k,
              "draw from the likeliest so many; 0: from all (default)");
    add_number(app, "--top-p", flags.top_p,
               "draw from the fewest likeliest tokens that have so much of the probability "
               "(default 1: all)");
    add_number(app, "--min-p", flags.min_p,
               "draw from tokens of at least so much of the greatest probability (default 0: all)");
    add_number(app, "--repetition-penalty", flags.repetition_penalty,
               "makes tokens less likely that the text has; 1: as they are (default)");
    add_number(app, "--presence-penalty", flags.presence_penalty,
               "taken from the logits of tokens that the answer has (default 0)");
    add_number(app, "--frequency-penalty", flags.frequency_penalty,
               "the same for each time that it has them (default 0)");
    app.add_option("--stop", flags.stop, "the text ends before this; more than once for several")
        ->type_name("TEXT")
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    app.add_flag("--ignore-eos", flags.ignore_end, "go on behind tokens that end a text");
    group(app, "Device");
    app.add_option("--precision", flags.precision,
                   "how the model computes (default: as the run did; of a Hugging Face folder as "
                   "it is stored)")
        ->type_name("f32|bf16|fp8");
    add_count(app, "--context", flags.context,
              "tokens of prompt and text that the model sees; behind them a text goes on with the "
              "last half (default: as needed; of a run its sequence)");
    app.add_option("--cache-type", flags.cache_type,
                   "how keys and values are kept (default: as the model computes; fp8: of latent "
                   "attention)")
        ->type_name("f32|bf16|fp8");
    app.add_flag("--exact", flags.exact,
                 "a text has the same bits alone and beside others; takes longer");
    app.add_option("--draft", flags.draft,
                   "what guesses the token behind the next one, so that a step may write two: mtp, "
                   "the model's module of multi-token prediction; the text is written as without "
                   "(default none)")
        ->type_name("none|mtp");
    add_device(app, flags.device, "where to run (default: as the run was); list: show the devices");
}

void add_generate(CLI::App& app, GenerateFlags& flags) {
    add_model(app, flags);
    app.add_option("--prompt", flags.prompt, "text to continue")->type_name("TEXT");
    app.add_option("--file", flags.file, "a file whose content is the prompt; -: standard input")
        ->type_name("FILE|-");
    app.add_option("--prompts", flags.prompts,
                   "a file with a prompt in each line, which are answered together; -: standard "
                   "input")
        ->type_name("FILE|-");
    app.add_flag("--chat", flags.chat,
                 "a prompt is a user's message, put as the model's chat template says; only the "
                 "answer is written");
    app.add_option("--data", flags.data,
                   "say on standard error which share of the written words stands in these files "
                   "and folders")
        ->type_name("PATH")
        ->expected(1, -1);
    group(app, "Text");
    add_count(app, "--tokens", flags.tokens, "to write after a prompt, at most")->required();
    app.add_flag("--json", flags.json, "an object in a line for each prompt");
    add_writing(app, flags);
    add_count(
        app, "--ranks", flags.ranks,
        "processes that share the prompts and the model's experts (default 1); --device may be "
        "a list, one for each in turn");
    app.add_option("--placement", flags.placement,
                   "which expert each slot of these processes holds, as `bellows plan experts "
                   "--distinct --json` prints it (default: each expert once)")
        ->type_name("FILE");
    app.add_flag("--allow-degraded", flags.allow_degraded,
                 "where a rank is lost, go on without experts that no other has, and say which "
                 "texts lack them; else all ends");
    app.footer(kGenerateHelp);
}

void add_chat(CLI::App& app, GenerateFlags& flags) {
    add_model(app, flags);
    group(app, "Text");
    add_count(app, "--tokens", flags.tokens, "of an answer, at most (default 1024)");
    app.add_flag("--times", flags.times, "say after each answer how fast it came");
    add_writing(app, flags);
    app.footer(kChatHelp);
}

void add_export(CLI::App& app, ExportFlags& flags) {
    group(app, "Input");
    app.add_option("--checkpoint", flags.checkpoint,
                   "a run's folder (its newest checkpoint), one checkpoint, or a Hugging Face "
                   "folder")
        ->type_name("DIR")
        ->required();
    group(app, "Output");
    app.add_option("--out", flags.out, "a new folder, or an empty one")
        ->type_name("DIR")
        ->required();
    app.add_option("--dtype", flags.dtype,
                   "how tensors are stored; fp8: linear layers in blocks of 128 x 128 (default: as "
                   "they are, which of a run is f32)")
        ->type_name("bf16|f32|fp8");
    app.add_option("--shard-size", flags.shard_size, "the most bytes in a file (default 5GB)")
        ->type_name("SIZE");
    app.footer(kExportHelp);
}

void add_schedule(CLI::App& app, ScheduleFlags& flags) {
    group(app, "What");
    app.add_option("--kind", flags.kind, "which schedule")->type_name("KIND");
    app.add_flag("--compare", flags.compare, "all kinds, for the same ranks and model");
    app.add_flag("--pair", flags.pair, "a forward beside a backward, node by node");
    group(app, "Sizes and costs");
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
    group(app, "Output");
    app.add_option("--format", flags.format, "how to show it (default text)")
        ->type_name("text|json|svg|trace");
    app.add_option("--out", flags.out, "write it there (default: standard output)")
        ->type_name("FILE");
    app.footer(kScheduleHelp);
}

void add_plan_experts(CLI::App& app, PlanExpertsFlags& flags) {
    group(app, "Input");
    app.add_option("--loads", flags.loads, "JSON with the load of each expert of each layer")
        ->type_name("FILE")
        ->required();
    group(app, "Sizes");
    add_count(app, "--ranks", flags.ranks, "that share a layer's experts")->required();
    add_count(app, "--slots", flags.slots, "for experts and their replicas, of all ranks together")
        ->required();
    add_count(app, "--groups", flags.groups,
              "of experts, of equal size, that routing chooses among (default 1)");
    add_count(app, "--nodes", flags.nodes, "hosts, with as many ranks each (default 1)");
    app.add_flag("--distinct", flags.distinct, "never two replicas of an expert on one rank");
    group(app, "Output");
    app.add_flag("--json", flags.json, "write JSON to standard output");
    app.footer(kPlanExpertsHelp);
}

void add_info(CLI::App& app, InfoFlags& flags, bool devices) {
    group(app, "What");
    app.add_option(
           "--model", flags.model,
           "count the parameters of a configuration file or preset, or say what a Hugging Face "
           "folder holds")
        ->type_name("PRESET|FILE|DIR")
        ->required(!devices);
    if (devices) {
        app.add_flag(
            "--kernels", flags.kernels,
            "show how each kind of FP8 product is computed, and its time in µs; measured once");
        app.add_flag("--retune", flags.retune, "with --kernels: measure again");
    }
    group(app, "Output");
    app.add_flag("--json", flags.json, "write JSON to standard output");
    group(app, "Device");
    add_device(app, flags.device, "this device alone; list: a line per device");
    app.footer(kInfoHelp);
}

void add_selftest(CLI::App& app, SelftestOptions& options, std::optional<std::string>& device) {
    group(app, "Output");
    app.add_option("--json", options.json, "write the report there as well")->type_name("FILE");
    group(app, "Device");
    add_device(app, device, "the device to check (default: the best); list: show the devices");
    app.footer(kSelftestHelp);
}

void add_config(CLI::App& app, ConfigFlags& flags) {
    group(app, "What");
    app.add_option("--dump", flags.dump,
                   "print a preset, or a configuration file, with all keys and what they mean")
        ->type_name("PRESET|FILE");
    app.add_flag("--list", flags.list, "print the names of the presets");
    app.footer(kConfigHelp);
}

} // namespace

CommandLine::CommandLine(const Commands& commands) {
    app.formatter(std::make_shared<HelpFormatter>());
    app.set_version_flag("--version", kVersion);
    app.require_subcommand(1);
    // Scripts with flags of their own let "$@" follow; subcommands inherit this.
    app.option_defaults()->take_last();
    app.footer(kMainHelp);
    if (commands.train) {
        train = app.add_subcommand("train", "Trains a model on text.");
        add_train(*train, train_flags);
    }
    if (commands.generate) {
        generate = app.add_subcommand("generate", "Writes text with a trained model.");
        add_generate(*generate, generate_flags);
    }
    if (commands.chat) {
        chat = app.add_subcommand("chat", "Talks with a model in a terminal.");
        add_chat(*chat, chat_flags);
    }
    export_model = app.add_subcommand("export", "Writes a model as a Hugging Face folder.");
    add_export(*export_model, export_flags);
    config = app.add_subcommand("config", "Prints presets as configuration files.");
    add_config(*config, config_flags);
    info = app.add_subcommand("info", commands.info ? "Shows the devices, or the size of a model."
                                                    : "Shows the size of a model.");
    add_info(*info, info_flags, static_cast<bool>(commands.info));
    if (commands.selftest) {
        selftest = app.add_subcommand(
            "selftest",
            "Checks that this device computes right; takes two to three minutes on a CPU.");
        add_selftest(*selftest, selftest_options, selftest_device);
    }
    schedule =
        app.add_subcommand("schedule", "Shows pipeline schedules: their ops, times, pictures.");
    add_schedule(*schedule, schedule_flags);
    plan = app.add_subcommand("plan", "Plans a run: where experts go.");
    plan->require_subcommand(1);
    plan->footer(kPlanHelp);
    plan_experts = plan->add_subcommand(
        "experts", "Places experts and their replicas on ranks, by their loads.");
    add_plan_experts(*plan_experts, plan_experts_flags);
    completion = app.add_subcommand("completion", "Prints a script that completes commands.");
    completion->add_option("shell", shell, "bash")
        ->required()
        ->type_name("bash")
        ->check(CLI::Validator(
            [](const std::string& name) {
                return name == "bash" ? "" : "completion is for bash, not " + in_quotes(name);
            },
            "", ""));
    completion->footer(kCompletionHelp);
}

std::vector<const CLI::App*> CommandLine::subcommands() const {
    return subcommands_of(app);
}

std::vector<const CLI::App*> subcommands_of(const CLI::App& command) {
    return command.get_subcommands([](const CLI::App*) { return true; });
}

std::vector<std::string> flag_names(const CLI::App& command) {
    std::vector<std::string> names;
    for (const CLI::Option* option : command.get_options())
        for (const std::string& name : option->get_lnames())
            names.push_back("--" + name);
    return names;
}

} // namespace bellows
