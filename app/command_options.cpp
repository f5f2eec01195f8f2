// SPDX-License-Identifier: MIT
#include "app/command_line.hpp"
#include "app/commands.hpp"
#include "app/exit_code.hpp"
#include "app/model_folder.hpp"
#include "app/options/config_text.hpp"
#include "app/train/initial_model.hpp"
#include "app/train/resumed_checkpoint.hpp"
#include "app/train/training_text.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/shape/parameters.hpp>
#include <bellows/shape/presets.hpp>
#include <bellows/train/config_overrides.hpp>
#include <bellows/train/sequence_source.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>
#include <system_error>
#include <utility>

namespace bellows {

namespace fs = std::filesystem;

namespace {

template <class T>
void override_with(T& value, const std::optional<T>& flag) {
    if (flag) {
        value = *flag;
    }
}

/// Errors of a flag's value say which key it is for.
template <class Read>
void named(const char* key, Read read) {
    try {
        read();
    } catch (const Error& error) {
        throw Error(error.code(), std::string(key) + ": " + error.message());
    }
}

RunConfig config_of(const Checkpoint& checkpoint) {
    return parse_run_config(checkpoint.text(kConfigFile),
                            (checkpoint.folder() / kConfigFile).string(), fs::current_path());
}

void apply_flags(TrainConfig& train, const TrainFlags& flags) {
    if (!flags.data.empty()) {
        train.data.clear();
        for (const std::string& path : flags.data) {
            train.data.push_back(fs::absolute(path).lexically_normal().string());
        }
    }
    if (flags.tokenizer)
        train.tokenizer = *flags.tokenizer == "bytes"
                              ? *flags.tokenizer
                              : fs::absolute(*flags.tokenizer).lexically_normal().string();
    override_with(train.holdout, flags.holdout);
    override_with(train.steps, flags.steps);
    override_with(train.batch, flags.batch);
    override_with(train.micro_batches, flags.micro_batches);
    override_with(train.seq, flags.seq);
    override_with(train.seed, flags.seed);
    override_with(train.lr, flags.lr);
    override_with(train.warmup_steps, flags.warmup);
    override_with(train.decay_steps, flags.decay);
    if (flags.precision)
        named("precision", [&] { from_text(train.precision, *flags.precision); });
    override_with(train.device, flags.device);
    if (flags.device_link)
        named("device_link", [&] { train.device_link = device_link_kind(*flags.device_link); });
    override_with(train.checkpoint_every, flags.checkpoint_every);
    override_with(train.eval_every, flags.eval_every);
    if (flags.pipeline)
        named("pipeline", [&] { train.pipeline = parse_schedule_kind(*flags.pipeline); });
    if (flags.pairs)
        named("pairs", [&] { train.pairs = parse_pair_mode(*flags.pairs); });
    train.tensorboard = train.tensorboard || flags.tensorboard;
    override_with(train.pp, flags.pp);
    override_with(train.dp, flags.dp);
    override_with(train.ep, flags.ep);
}

/// Of a resumed run the old layout is a default, too, as long as the number of ranks stays.
void forget_layout(TrainConfig& train, const TrainFlags& flags) {
    if (flags.ranks || flags.dp || flags.pp) {
        train.dp = train.ep = 0;
        if (std::exchange(train.pp, 1) != flags.pp.value_or(1)) {
            train.pipeline = TrainConfig().pipeline;
        }
    }
}

std::uint64_t number_of_ranks(const TrainFlags& flags, std::uint64_t otherwise) {
    if (!is_launched()) {
        return flags.ranks.value_or(otherwise);
    }
    const auto started = static_cast<std::uint64_t>(std::max(launched_size(), 0));
    if (started > 0 && flags.ranks && *flags.ranks != started) {
        throw Error(ErrorCode::InvalidArgument,
                    "--ranks " + std::to_string(*flags.ranks) + ", but mpirun or srun started " +
                        std::to_string(started) + "; leave --ranks out");
    }
    if (started == 0 && !flags.ranks) {
        throw Error(ErrorCode::InvalidArgument,
                    "this MPI launcher does not say how many ranks it started; give --ranks");
    }
    return started > 0 ? started : *flags.ranks;
}

void check_resumable(const Checkpoint& checkpoint, const TrainOptions& options) {
    const RunConfig saved = config_of(checkpoint);
    const TrainConfig& train = options.config.train;
    const std::string folder = in_quotes(checkpoint.folder().string());
    if (!(saved.model == options.config.model)) {
        throw Error(ErrorCode::InvalidArgument,
                    "the checkpoint " + folder +
                        " holds a model of another shape; leave --config "
                        "out to resume with its own");
    }
    if (checkpoint.state().step >= train.steps) {
        throw Error(ErrorCode::InvalidArgument,
                    "the checkpoint " + folder + " has done " +
                        std::to_string(checkpoint.state().step) + " steps, --steps says " +
                        std::to_string(train.steps) + " in total; give more");
    }
}

/// Whether the run goes on in the folder that it is resumed from.
bool resumes_in_place(const TrainOptions& options) {
    std::error_code error;
    const auto run = options.resume ? run_of_checkpoint(*options.resume) : std::nullopt;
    return run && fs::equivalent(*run, options.out, error);
}

Checkpoint open_to_resume(const TrainFlags& flags) {
    // The process that started this rank has read the checkpoint through, and named it.
    const bool told = is_launched() && has_launcher();
    const bool tells = !is_launched() || launched_rank() <= 0;
    return open_resumed(*flags.resume, flags.fall_back && !told, [&](const std::string& line) {
        if (tells)
            std::fprintf(stderr, "bellows: %s\n", line.c_str());
    });
}

} // namespace

TrainOptions resolve_train(const TrainFlags& flags) {
    TrainOptions options;
    std::optional<Checkpoint> checkpoint;
    std::uint64_t ranks = 1;
    if (flags.init && flags.resume)
        throw Error(ErrorCode::InvalidArgument,
                    "--init gives a new run its weights, --resume goes on with an old one; leave "
                    "one of them out");
    if (flags.resume) {
        checkpoint = open_to_resume(flags);
        options.resume = checkpoint->folder();
        const RunLayout& layout = checkpoint->state().layout;
        ranks = std::uint64_t{layout.pp} * layout.dp;
    }
    if (flags.init) {
        take_initial_model(flags, options);
    } else if (flags.config) {
        options.config_name = *flags.config;
        options.config = load_run_config(*flags.config);
    } else if (checkpoint) {
        options.config_name = checkpoint->folder().string();
        options.config = config_of(*checkpoint);
        forget_layout(options.config.train, flags);
    } else {
        throw Error(ErrorCode::InvalidArgument,
                    "give --config with a configuration file or a preset, or --init, or --resume");
    }
    const ModelConfig initial = options.config.model;
    options.config = with_overrides(options.config, flags.set, fs::current_path());
    if (flags.init && !computes_alike(options.config.model, initial))
        throw Error(ErrorCode::InvalidArgument,
                    "--set changes the model, whose shape is that of --init " +
                        in_quotes(options.init->string()));
    apply_flags(options.config.train, flags);
    TrainConfig& train = options.config.train;
    validate(train);
    ranks = number_of_ranks(flags, ranks);
    if (train.pp > 1 && train.micro_batches == 1 && !flags.micro_batches &&
        (!checkpoint || flags.config)) {
        train.micro_batches = usual_micro_batches(train, ranks);
    }
    options.layout = resolve_layout(options.config.model, train, ranks);
    train.dp = options.layout.dp;
    train.ep = options.layout.ep;
    if (checkpoint) {
        check_resumable(*checkpoint, options);
        options.keeps_tokenizer = config_of(*checkpoint).train.tokenizer == train.tokenizer;
    }
    if (train.data.empty()) {
        throw Error(ErrorCode::InvalidArgument, "no data: give --data with text files or folders");
    }
    if (flags.out) {
        options.out = fs::absolute(*flags.out).lexically_normal();
    } else if (checkpoint) {
        const auto run = run_of_checkpoint(checkpoint->folder());
        if (!run) {
            throw Error(
                ErrorCode::InvalidArgument,
                "the checkpoint " + in_quotes(checkpoint->folder().string()) +
                    " is no run's checkpoints/step-N; give --out with a folder for the run");
        }
        options.out = *run;
    } else {
        throw Error(ErrorCode::InvalidArgument, "give --out with a folder for the run");
    }
    return options;
}

void check_vocabulary(const ModelConfig& model, const Tokenizer& tokenizer) {
    if (tokenizer.vocabulary() > model.vocabulary) {
        throw Error(ErrorCode::InvalidArgument,
                    "the tokenizer has " + std::to_string(tokenizer.vocabulary()) +
                        " ids, the model a vocabulary of " + std::to_string(model.vocabulary));
    }
}

Tokenizer tokenizer_of(const Checkpoint& checkpoint, const TrainConfig& config) {
    return checkpoint.has_text(kTokenizerFile)
               ? Tokenizer::from_model(checkpoint.text(kTokenizerFile),
                                       (checkpoint.folder() / kTokenizerFile).string())
               : Tokenizer::from_name(config.tokenizer);
}

Tokenizer tokenizer_of(const TrainOptions& options) {
    const TrainConfig& train = options.config.train;
    Tokenizer tokenizer = options.keeps_tokenizer
                              ? tokenizer_of(Checkpoint::open(*options.resume), train)
                              : Tokenizer::from_name(train.tokenizer);
    check_vocabulary(options.config.model, tokenizer);
    return tokenizer;
}

void check_text(const TrainConfig& train, const Corpus& corpus) {
    const DataSplit split = split_corpus(corpus, train.holdout);
    const ShuffledSequences source(corpus, split.train, {train.seed, train.batch, train.seq});
    if (train.holdout > 0 && split.holdout.count <= train.seq) {
        throw Error(ErrorCode::InvalidArgument,
                    "holdout = " + std::to_string(train.holdout) + " keeps " +
                        std::to_string(split.holdout.count) +
                        " tokens out of training, fewer than one sequence of " +
                        std::to_string(train.seq) + " + 1; raise it, or set it to 0");
    }
}

void check_training_input(const TrainOptions& options) {
    check_training_text(options);
    if (options.resume) {
        try {
            Checkpoint::open(*options.resume).verify();
        } catch (const Error& error) {
            throw with_older(error, *options.resume);
        }
    }
    std::error_code error;
    const fs::file_status status = fs::status(options.out, error);
    if (fs::exists(status) && !fs::is_directory(status)) {
        throw Error(ErrorCode::InvalidArgument,
                    "--out " + in_quotes(options.out.string()) + " is not a folder");
    }
    if (latest_checkpoint(options.out) && !resumes_in_place(options)) {
        throw Error(ErrorCode::InvalidArgument,
                    "--out " + in_quotes(options.out.string()) +
                        " already holds a run; go on with --resume, or take another folder");
    }
}

PreparedOutput prepare_output(const TrainOptions& options) {
    std::error_code error;
    fs::create_directories(options.out, error);
    if (error) {
        throw Error(ErrorCode::Io, errno_message("create", options.out, error.value()));
    }
    PreparedOutput output;
    std::string holder;
    output.lock = lock_file(options.out / ".lock", holder);
    if (output.lock.get() < 0) {
        throw Error(ErrorCode::InvalidArgument,
                    "another run" + (holder.empty() ? "" : " (process " + holder + ")") +
                        " writes to " + in_quotes(options.out.string()) +
                        "; wait for its end, stop it, or name another folder with --out");
    }
    if (resumes_in_place(options)) {
        const std::uint64_t step = Checkpoint::open(*options.resume).state().step;
        output.set_aside = set_aside_newer_checkpoints(options.out, step);
    }
    write_file_durably(options.out / kConfigFile, options.config_text());
    return output;
}

namespace {

/// Where it is, its configuration, and the tokenizer unless the checkpoint holds it.
void open_model(const GenerateFlags& flags, GenerateOptions& options) {
    if (!HfFolder::is_one(flags.checkpoint)) {
        const Checkpoint checkpoint = Checkpoint::open(flags.checkpoint);
        options.checkpoint = checkpoint.folder();
        options.config = config_of(checkpoint);
        return;
    }
    const HfFolder folder(flags.checkpoint);
    options.checkpoint = folder.folder();
    options.config.model = folder.config().model;
    options.config.train.precision = usual_precision(folder);
    options.tokenizer = flags.tokenizer ? *flags.tokenizer : folder_tokenizer(folder);
    for (const std::uint64_t end : end_tokens(folder.folder(), folder.config()))
        options.ends.push_back(static_cast<std::uint32_t>(end));
}

} // namespace

GenerateOptions resolve_generate(const GenerateFlags& flags) {
    GenerateOptions options;
    open_model(flags, options);
    override_with(options.tokenizer, flags.tokenizer);
    if (flags.precision)
        named("precision", [&] { from_text(options.config.train.precision, *flags.precision); });
    validate(options.config.train);
    options.prompt = flags.prompt;
    override_with(options.tokens, flags.tokens);
    if (options.tokens == 0) {
        throw Error(ErrorCode::InvalidArgument, "--tokens must be at least 1");
    }
    override_with(options.temperature, flags.temperature);
    override_with(options.seed, flags.seed);
    override_with(options.config.train.device, flags.device);
    options.known_text = flags.data;
    return options;
}

InfoOptions resolve_info(const InfoFlags& flags) {
    if (flags.retune && !flags.kernels) {
        throw Error(ErrorCode::InvalidArgument, "--retune goes with --kernels");
    }
    return {flags.json, flags.device.value_or(""), flags.kernels, flags.retune};
}

namespace {

[[noreturn]] void refuse(const std::string& why) {
    throw Error(ErrorCode::InvalidArgument, why);
}

ScheduleFormat parse_schedule_format(const std::string& format) {
    constexpr std::array<std::string_view, 4> kFormats = {"text", "json", "svg", "trace"};
    const auto found = std::find(kFormats.begin(), kFormats.end(), format);
    if (found == kFormats.end()) {
        refuse("there is no --format " + in_quotes(format) + ", there are: text, json, svg, trace");
    }
    return static_cast<ScheduleFormat>(found - kFormats.begin());
}

PairOptions resolve_pair(const ScheduleFlags& flags) {
    constexpr std::uint64_t kMostLayers = 100;
    if (flags.ranks || flags.micro_batches || flags.chunks || flags.decoupled ||
        flags.early_gradients) {
        refuse("--ranks, --micro-batches, --chunks, --decoupled and --early-gradients are of a "
               "schedule, --pair has none");
    }
    PairOptions options;
    options.layer = parse_pair_costs(flags.costs.value_or(""));
    options.layers = flags.layers.value_or(options.layers);
    if (options.layers == 0 || options.layers > kMostLayers) {
        refuse("--layers must be 1 to " + std::to_string(kMostLayers) + ", not " +
               std::to_string(options.layers));
    }
    if (flags.order) {
        options.order = parse_pattern(*flags.order);
    }
    return options;
}

} // namespace

ScheduleOptions resolve_schedule(const ScheduleFlags& flags) {
    ScheduleOptions options;
    if (flags.kind.has_value() + flags.compare + flags.pair != 1) {
        refuse("--kind names a schedule, or --compare shows all of them, or --pair what a pair of "
               "layers hides");
    }
    options.format = parse_schedule_format(flags.format.value_or("text"));
    options.out = flags.out;
    if (flags.pair) {
        options.pair = resolve_pair(flags);
        return options;
    }
    if (flags.layers || flags.order) {
        refuse("--layers and --order go with --pair");
    }
    options.compare = flags.compare;
    if (flags.kind) {
        options.desc.kind = parse_schedule_kind(*flags.kind);
    }
    if (flags.chunks && flags.kind && options.desc.kind != ScheduleKind::Interleaved) {
        refuse("--chunks goes with --kind interleaved or --compare");
    }
    options.desc.ranks = flags.ranks.value_or(4);
    options.desc.micro_batches = flags.micro_batches.value_or(4 * options.desc.ranks);
    options.desc.chunks = flags.chunks.value_or(2);
    options.costs = parse_costs(flags.costs.value_or(""));
    options.decoupled = flags.decoupled;
    options.early_gradients = flags.early_gradients;
    if (flags.compare && options.format >= ScheduleFormat::Svg) {
        refuse("--compare is shown as text or json");
    }
    return options;
}

std::string config_text(const ConfigFlags& flags) {
    if (flags.dump.has_value() == flags.list) {
        refuse("give --dump with a preset, or --list");
    }
    if (flags.dump) {
        return commented_toml(load_run_config(*flags.dump), *flags.dump);
    }
    std::string names;
    for (const std::string& name : preset_names()) {
        names += name + "\n";
    }
    return names;
}

int print_model_info(const InfoFlags& flags) {
    if (HfFolder::is_one(*flags.model))
        return print_folder_info(*flags.model, flags.json);
    const ModelConfig model = load_run_config(*flags.model).model;
    const ParameterCount count = count_parameters(model);
    if (flags.json) {
        const nlohmann::ordered_json json = {{"model", *flags.model},
                                             {"parameters", count.total},
                                             {"active_parameters_per_token", count.active},
                                             {"embedding_parameters", count.embedding},
                                             {"parameters_per_expert", count.expert},
                                             {"layers", model.layers},
                                             {"dense_layers", model.dense_layers},
                                             {"routed_experts", model.routed_experts},
                                             {"top_k", model.top_k}};
        std::printf("%s\n",
                    json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
        return kExitGood;
    }
    const auto line = [](const char* what, std::uint64_t value) {
        std::printf("  %-22s %16llu  (%s)\n", what, static_cast<unsigned long long>(value),
                    format_count(static_cast<double>(value)).c_str());
    };
    std::printf(
        "%s: %llu layers, the first %llu dense; %llu routed experts, top %llu, %llu shared\n",
        flags.model->c_str(), static_cast<unsigned long long>(model.layers),
        static_cast<unsigned long long>(model.dense_layers),
        static_cast<unsigned long long>(model.routed_experts),
        static_cast<unsigned long long>(model.top_k),
        static_cast<unsigned long long>(model.shared_experts));
    line("parameters", count.total);
    line("active per token", count.active);
    line("embedding and head", count.embedding);
    line("one routed expert", count.expert);
    return kExitGood;
}

} // namespace bellows
