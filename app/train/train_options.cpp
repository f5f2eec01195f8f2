// SPDX-License-Identifier: MIT
// This source makes the options of `bellows train` from its flags, its configuration and the
// checkpoint that it goes on from.
#include "app/command_line.hpp"
#include "app/commands.hpp"
#include "app/options/flag_values.hpp"
#include "app/train/initial_model.hpp"
#include "app/train/resumed_checkpoint.hpp"
#include "app/train/training_text.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/train/config_overrides.hpp>
#include <bellows/train/sequence_source.hpp>

#include <algorithm>
#include <system_error>
#include <utility>

namespace bellows {

namespace fs = std::filesystem;

namespace {

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
    override_with(train.peak_tflops, flags.peak_tflops);
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
    override_with(train.eplb_every, flags.eplb_every);
    override_with(train.eplb_slots, flags.eplb_slots);
}

/// A resumed run keeps its old layout as the default while its number of ranks stays the same.
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

} // namespace bellows
