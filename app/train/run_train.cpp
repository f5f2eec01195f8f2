// SPDX-License-Identifier: MIT
// The body of `bellows train` on one rank.
#include "app/run.hpp"

#include "app/exit_code.hpp"
#include "app/model_folder.hpp"
#include "app/pictures/expert_plot.hpp"
#include "app/pictures/loss_plot.hpp"
#include "app/pictures/pipeline_report.hpp"
#include "app/progress.hpp"
#include "app/stop_signal.hpp"
#include "app/trace_file.hpp"
#include "app/train/finished_run.hpp"
#include "app/train/held_out.hpp"
#include "app/train/run_checkpoints.hpp"
#include "app/train/training_text.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/comm/phase.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/plan/memory_estimate.hpp>
#include <bellows/run/devices.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/run/matrix_peak.hpp>
#include <bellows/shape/batch_ramp.hpp>
#include <bellows/shape/flops.hpp>
#include <bellows/train/checkpoints.hpp>
#include <bellows/train/metrics.hpp>
#include <bellows/train/sequence_source.hpp>
#include <bellows/train/step_parts.hpp>
#include <bellows/train/tensorboard.hpp>
#include <bellows/train/trainer.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

namespace {

using Clock = std::chrono::steady_clock;

/// Steps at the end of a run that the trace shows.
constexpr std::uint64_t kTracedSteps = 2;

/// Seconds of compiling that go by without a word.
constexpr double kSilentCompilation = 2;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

const KernelNames* kept_by(const std::optional<Checkpoint>& before) {
    return before ? &before->state().kernels : nullptr;
}

/// One run of this rank.
class TrainRun {
public:
    TrainRun(const TrainOptions& options, World& world);
    /// The exit code.
    int run();
    /// On rank 0, after run().
    std::optional<FinishedRun> take_results() { return std::move(results_); }

private:
    void check_memory(const std::optional<Checkpoint>& before);
    void name_devices(const std::vector<DeviceShare>& shares);
    void read_text();
    void find_peak();
    void describe_flops(const std::string& peak);
    void make_trainer(const KernelChoice& kernels);
    bool leads() const { return world_.rank() == 0; }
    StepAsks asks() const;
    StepAsks one_step(std::uint64_t step);
    std::vector<ExpertBalance> balance_of(const std::vector<LayerLoads>& layers,
                                          std::uint64_t steps_done) const;
    void begin_trace(std::uint64_t step);
    void take_trace_ahead();
    std::vector<TraceEvent> take_trace();
    std::optional<StepParts> count_parts();
    FlopsByPart flops_of(const StepResult& result) const;
    std::optional<double> held_out_loss(std::uint64_t steps_done);
    void save(std::uint64_t steps_done);
    void finish();
    void draw_losses(const std::string& layout);
    void draw_experts(const std::string& layout, RunSummary& summary);
    void report(const std::string& title, std::uint64_t done, std::uint64_t total);
    template <class Write>
    void warn_if_not_written(Write write);

    const TrainOptions& options_;
    const TrainConfig& train_;
    World& world_;
    Tokenizer tokenizer_;
    std::optional<Corpus> corpus_;
    FlopsByPart forward_flops_;   ///< of a token
    double peak_flops_per_s_ = 0; ///< of a rank's device; 0: not known
    double bytes_per_token_ = 1;  ///< of the bytes tokenizer 1: ends of documents count as bytes
    std::optional<ShuffledSequences> sequences_;
    std::optional<HeldOutText> held_out_; ///< to look at every eval_every steps
    PreparedOutput output_;               ///< rank 0's
    std::optional<ProgressReporter> progress_;
    RunCheckpoints checkpoints_;
    std::unique_ptr<Device> device_;
    std::optional<Trainer> trainer_;
    std::optional<MetricsLog> log_;
    std::optional<TensorboardLog> tensorboard_;
    std::uint64_t first_step_ = 0;
    std::optional<FinishedRun> results_;
    std::vector<TraceEvent> trace_;       ///< of the last steps but the one that runs
    std::vector<TraceEvent> trace_ahead_; ///< of this step, taken before it is asked for
    std::size_t counted_ = 0;             ///< of these: in the parts of the step's line
    StepPartsCounter parts_;              ///< since the last line, on rank 0
    double clock_origin_ = 0;             ///< see report_pipeline()
    bool stopped_ = false;                ///< before the last step, because a signal asked for it
    bool warned_ = false;                 // that a file other than a checkpoint cannot be written
};

TrainRun::TrainRun(const TrainOptions& options, World& world)
    : options_(options), train_(options.config.train), world_(world),
      tokenizer_(tokenizer_of(options)),
      checkpoints_(options, world, [this](const std::string& line) {
          if (progress_)
              progress_->note(line);
      }) {
    if (leads())
        progress_.emplace(stdout, train_.steps, ProgressReporter::detect(stdout));
    DeviceOptions device_options = device_options_of_rank(train_.device, world_.local_rank());
    device_options.trace = true;
    // Drivers that find them in a cache are through before anybody would want to know. How many
    // there will be shows only as the work is recorded.
    device_options.on_pipeline_compiled = [this, start = Clock::now()](const std::string&,
                                                                       std::uint32_t count) {
        if (seconds_since(start) > kSilentCompilation)
            report("compiling shaders", count, 0);
    };
    device_ = Device::create(device_options);
    std::optional<Checkpoint> before;
    if (options.resume)
        before.emplace(Checkpoint::open(*options.resume));
    check_memory(before);
    if (leads()) { // nothing is written before a device serves
        output_ = prepare_output(options);
        for (const std::filesystem::path& newer : output_.set_aside)
            progress_->note("newer than the checkpoint that the run goes on from, kept as " +
                            newer.string());
    }
    read_text();
    const KernelChoice kernels =
        choose_kernels(*device_, train_.precision, kept_by(before), leads(),
                       [this](std::uint64_t done, std::uint64_t total) {
                           report("measuring products", done, total);
                       });
    find_peak();
    world_.control().barrier(kDiskPatience, "measuring products");
    make_trainer(kernels);
    if (progress_ && !trainer_->device_link().empty())
        progress_->note("devices of a host are linked (" + trainer_->device_link() +
                        "): what their ranks exchange does not pass through its memory");
    if (progress_ && !trainer_->why_decoded().empty())
        progress_->note(std::string("warning: ") +
                        (train_.precision == Precision::FP8
                             ? "operands of FP8 products are decoded ahead"
                             : "bf16 products are the engine's") +
                        ", as " + trainer_->why_decoded());
    if (before) {
        load_checkpoint(*before, *trainer_, world_);
        first_step_ = before->state().step;
        if (progress_)
            progress_->note("resuming at step " + std::to_string(first_step_) + " of " +
                            std::to_string(train_.steps) + ", from " + before->folder().string());
    }
    if (leads())
        log_.emplace(options.out / "metrics.jsonl", first_step_);
    if (leads() && train_.tensorboard)
        tensorboard_.emplace(options.out, first_step_);
    trainer_->ask_by([this] { return asks(); });
    checkpoints_.begin(before ? before->folder() : std::filesystem::path(),
                       log_ ? log_->steps() : std::vector<StepMetrics>());
}

/// Every rank works this out for all of them from the same figures, taken before any has allocated
/// much: all refuse alike.
void TrainRun::check_memory(const std::optional<Checkpoint>& before) {
    // Rank 0 chooses the products for all; of the rest whatever takes more.
    const auto apart = [this](QueueRole role, QueueRole other) {
        return device_->distinct_queues(role, other) ? 1 : 0;
    };
    std::array<std::int64_t, 4> compute{
        leads() && wants_copies_of_weights(*device_, train_.precision, kept_by(before)) ? 1 : 0,
        device_->info().is_cpu ? 0 : 1, apart(QueueRole::Compute, QueueRole::ComputeDeferred),
        apart(QueueRole::ComputeDeferred, QueueRole::ComputeDeferredBeside)};
    HostCollectives(world_, Group::all(world_.size()))
        .all_reduce_max(std::span<std::int64_t>(compute));
    const std::vector<DeviceShare> shares = device_shares(*device_, world_);
    name_devices(shares);
    for (std::size_t rank = 0; rank < shares.size(); ++rank) {
        const MemoryEstimate estimate =
            estimate_memory(options_.config.model, train_, options_.layout, world_.topology(),
                            rank / options_.layout.dp,
                            {.tiles = compute[1] != 0,
                             .copies = compute[0] != 0,
                             .apart = compute[2] != 0,
                             .experts_apart = compute[3] != 0,
                             .linked = train_.device_link != DeviceLinkKind::Off});
        require_memory(estimate, shares[rank].available, shares[rank].ranks, shares[rank].name);
        if (progress_ && rank == 0)
            progress_->note("memory of rank 0, estimated " + describe_memory(estimate.bytes) +
                            " (of " + format_bytes(shares[0].available / shares[0].ranks) + ")");
    }
}

/// Of several ranks all have the same configuration, and as a rule the same environment.
void TrainRun::name_devices(const std::vector<DeviceShare>& shares) {
    if (!progress_)
        return;
    progress_->note("device: " + describe_devices(shares));
    const bool on_cpu = std::ranges::any_of(shares, &DeviceShare::is_cpu);
    if (const std::string& asked = device_->options().select;
        on_cpu && (asked.empty() || asked == kAnyDevice))
        progress_->note("warning: no GPU serves, so this run computes on the CPU, which is slow; "
                        "`bellows train --device list` says why, --device cpu that it is meant");
}

/// Of the host's memory, the tokens take what the system can spare for the pages of their file.
void TrainRun::read_text() {
    corpus_ = training_text(options_, tokenizer_, world_,
                            [this](std::uint64_t done, std::uint64_t total) {
                                if (done < total)
                                    progress_->percent("tokenising the text", done, total);
                            });
    sequences_.emplace(*corpus_, split_corpus(*corpus_, train_.holdout).train,
                       SequenceOrder{train_.seed, train_.batch, train_.seq, batch_ramp(train_)});
    bytes_per_token_ = tokenizer_.name() == "bytes" ? 1 : corpus_->bytes_per_token();
    if (train_.eval_every > 0)
        held_out_ = held_out_text(*corpus_, train_);
    if (progress_)
        progress_->note("text: " + describe(*corpus_) + "; " +
                        std::to_string(corpus_->num_tokens()) + " tokens in " + kTokensFile + ", " +
                        format_bytes(corpus_->bytes()) + " that the ranks of a host share");
}

/// On rank 0, before memory is taken for the training.
void TrainRun::find_peak() {
    if (!leads())
        return;
    forward_flops_ = forward_flops(options_.config.model, mean_visible_keys(train_.seq));
    if (train_.peak_tflops > 0) {
        peak_flops_per_s_ = 1e12 * train_.peak_tflops;
        describe_flops("as --peak-tflops says");
        return;
    }
    const MatrixPeak peak = measure_matrix_peak(*device_);
    device_->take_trace(); // it is no step's
    peak_flops_per_s_ = peak.flops_per_s;
    describe_flops(peak.what);
}

void TrainRun::describe_flops(const std::string& peak) {
    const double all = forward_flops_.total();
    std::string shares;
    const auto add = [&](const char* part, double flops) {
        if (flops > 0)
            shares += (shares.empty() ? "" : ", ") + std::string(part) + " " + percent(flops / all);
    };
    add("attention projections", forward_flops_.attention_projections);
    add("attention core", forward_flops_.attention_core);
    add("router", forward_flops_.router);
    add("experts", forward_flops_.experts);
    add("shared experts", forward_flops_.shared_experts);
    add("dense FFN", forward_flops_.dense_ffn);
    add("head", forward_flops_.head);
    add("MTP projections", forward_flops_.mtp_projections);
    progress_->note("model FLOPs: " + format_si(all, "FLOP") + " per token forward (" + shares +
                    "), causal" + (train_.document_mask ? ", within documents less" : "") +
                    ", times 3 for training: " + format_si(training_flops(forward_flops_), "FLOP"));
    if (peak_flops_per_s_ > 0)
        progress_->note("MFU is model FLOPs per second and rank over " +
                        format_si(peak_flops_per_s_, "FLOP/s") + " (" + peak + ")");
}

/// With the weights of the folder of --init, else random ones.
void TrainRun::make_trainer(const KernelChoice& kernels) {
    std::optional<HfFolder> folder;
    std::optional<ReadingProgress> reading;
    FirstWeights weights;
    if (options_.init) {
        folder.emplace(*options_.init);
        if (progress_)
            reading.emplace(*progress_, folder->bytes());
        weights = weights_of(*folder, world_, [&](std::uint64_t done, std::uint64_t total) {
            if (reading)
                (*reading)(done, total);
        });
    }
    trainer_.emplace(*device_, world_, options_.config, options_.layout, kernels, weights);
    if (train_.document_mask)
        trainer_->end_documents_with(tokenizer_.end_of_document());
    if (folder && progress_)
        progress_->note("the first weights are those of " + folder->folder().string());
}

void TrainRun::report(const std::string& title, std::uint64_t done, std::uint64_t total) {
    if (progress_)
        progress_->phase(title, done, total);
}

/// A full disk does not end a run: the first such failure of rank 0 becomes a warning.
template <class Write>
void TrainRun::warn_if_not_written(Write write) {
    try {
        write();
    } catch (const Error& error) {
        if (error.code() != ErrorCode::Io || !progress_)
            throw;
        if (!std::exchange(warned_, true))
            progress_->note("warning: " + error.message());
    }
}

/// Any rank may have got the signal; the clock is rank 0's.
StepAsks TrainRun::asks() const {
    return {.save = leads() && checkpoints_.is_due_by_time(), .stop = stop_asked()};
}

StepAsks TrainRun::one_step(std::uint64_t step) {
    const auto start = Clock::now();
    world_.enter_phase("in step " + std::to_string(step + 1));
    const StepResult result = trainer_->step(step, *sequences_);
    const double seconds = seconds_since(start);
    const std::optional<StepParts> parts = count_parts();
    const std::optional<double> held_out = held_out_loss(step + 1);
    if (!leads())
        return result.asked;
    StepMetrics metrics;
    metrics.step = step + 1;
    metrics.loss = result.loss;
    metrics.loss_nats_per_byte = result.loss / bytes_per_token_;
    metrics.mtp_losses_nats_per_token = result.mtp_losses;
    metrics.grad_norm = result.grad_norm;
    metrics.lr = learning_rate(train_, step + 1);
    metrics.seconds = seconds;
    metrics.held_out_loss = held_out;
    if (held_out)
        metrics.held_out_loss_nats_per_byte = *held_out / bytes_per_token_;
    const double tokens = static_cast<double>(result.sequences * train_.seq);
    metrics.tokens_per_s = tokens / metrics.seconds;
    metrics.model_flops_per_s = metrics.tokens_per_s * training_flops(flops_of(result));
    metrics.model_flops_per_s_per_rank =
        metrics.model_flops_per_s / static_cast<double>(world_.size());
    if (peak_flops_per_s_ > 0)
        metrics.mfu = *metrics.model_flops_per_s_per_rank / peak_flops_per_s_;
    metrics.parts = parts;
    if (train_.batch_start > 0)
        metrics.sequences = result.sequences;
    metrics.bytes_exchanged = result.bytes_exchanged;
    metrics.seconds_waited = result.seconds_waited;
    metrics.experts = balance_of(result.expert_loads, step + 1);
    metrics.moves = result.moved_experts;
    warn_if_not_written([&] { log_->add(metrics); });
    if (tensorboard_)
        warn_if_not_written([&] { tensorboard_->add(metrics); });
    progress_->step(metrics);
    checkpoints_.watch_loss(step + 1, result.loss);
    if (!result.updated)
        progress_->note("warning: step " + std::to_string(step + 1) +
                        ": the gradient is not finite, the weights stay as they are");
    return result.asked;
}

/// Returns the forward operations of a token. Where attention stays within documents, those of the
/// keys that the step's tokens saw count.
FlopsByPart TrainRun::flops_of(const StepResult& result) const {
    FlopsByPart flops = forward_flops_;
    if (result.visible_keys)
        flops.attention_core *= *result.visible_keys / mean_visible_keys(train_.seq);
    return flops;
}

std::vector<ExpertBalance> TrainRun::balance_of(const std::vector<LayerLoads>& layers,
                                                std::uint64_t steps_done) const {
    const std::uint64_t numbers = layers.size() * options_.config.model.routed_experts;
    std::vector<ExpertBalance> balance;
    for (const LayerLoads& layer : layers)
        balance.push_back(expert_balance(layer, keeps_loads(steps_done, numbers)));
    return balance;
}

/// On all ranks; at the run's last step, too. Its work is no step's, so the trace leaves it out.
std::optional<double> TrainRun::held_out_loss(std::uint64_t steps_done) {
    if (!held_out_ || (steps_done % train_.eval_every != 0 && steps_done != train_.steps))
        return std::nullopt;
    device_->wait_idle(wait_limit(train_));
    take_trace_ahead();
    const double loss = trainer_->held_out_loss(held_out_->by_index(), held_out_->count);
    device_->wait_idle(wait_limit(train_));
    device_->take_trace();
    return loss;
}

std::vector<TraceEvent> TrainRun::take_trace() {
    take_trace_ahead();
    std::vector<TraceEvent> events = std::exchange(trace_ahead_, {});
    const std::size_t counted = std::min(std::exchange(counted_, 0), events.size());
    if (leads())
        parts_.add(std::span(events).subspan(counted));
    return events;
}

void TrainRun::take_trace_ahead() {
    std::vector<TraceEvent> more = device_->take_trace();
    trace_ahead_.insert(trace_ahead_.end(), std::make_move_iterator(more.begin()),
                        std::make_move_iterator(more.end()));
}

/// On rank 0: of what has ended since the step before was counted. What runs now is the update,
/// which then counts in the next step.
std::optional<StepParts> TrainRun::count_parts() {
    if (!leads())
        return std::nullopt;
    take_trace_ahead();
    parts_.add(std::span(trace_ahead_).subspan(std::exchange(counted_, trace_ahead_.size())));
    return parts_.take();
}

/// Of a step: the last ones' traces are kept, the last one's apart.
void TrainRun::begin_trace(std::uint64_t step) {
    const std::vector<TraceEvent> before = take_trace();
    if (step + kTracedSteps <= train_.steps)
        trace_.clear();
    else
        trace_.insert(trace_.end(), before.begin(), before.end());
    if (step + 1 == train_.steps && world_.topology().num_nodes() > 1) {
        world_.control().barrier(wait_limit(train_), "setting clocks");
        clock_origin_ = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    }
}

void TrainRun::save(std::uint64_t steps_done) {
    device_->wait_idle(wait_limit(train_)); // downloads would not wait as long for the update
    checkpoints_.save(*trainer_, tokenizer_, steps_done);
}

void TrainRun::draw_losses(const std::string& layout) {
    std::vector<LossPoint> points, held_out;
    for (const StepMetrics& step : log_->steps()) {
        points.push_back({step.step, step.loss / bytes_per_token_});
        if (step.held_out_loss)
            held_out.push_back({step.step, *step.held_out_loss / bytes_per_token_});
    }
    LossPlotOptions plot;
    plot.tokens_scale = bytes_per_token_;
    plot.title = "Training loss of " + options_.config_name;
    plot.subtitle = layout;
    warn_if_not_written([&] {
        write_file_durably(options_.out / "loss.svg", loss_plot_svg(points, plot, held_out));
    });
}

/// Of models that have some; those steps count that are in metrics.jsonl.
void TrainRun::draw_experts(const std::string& layout, RunSummary& summary) {
    if (options_.config.model.moe_layers() == 0)
        return;
    warn_if_not_written([&] {
        ExpertHistory history;
        read_metrics(options_.out / "metrics.jsonl",
                     [&](const StepMetrics& step) { history.add(step); });
        ExpertPlotOptions plot;
        plot.title = "Balance of the experts of " + options_.config_name;
        plot.subtitle = layout;
        write_file_durably(options_.out / "experts.svg", expert_plot_svg(std::move(history), plot));
        summary.expert_picture = options_.out / "experts.svg";
    });
}

void TrainRun::finish() {
    world_.enter_phase("while reporting on the run");
    device_->wait_idle(wait_limit(train_));
    device_->save_pipeline_cache();
    const std::vector<TraceEvent> last = take_trace();
    std::optional<PipelineReport> report;
    if (first_step_ < train_.steps && !stopped_ && world_.size() > 1)
        report = report_pipeline(world_, trainer_->schedule(), options_.layout, last, *device_,
                                 clock_origin_);
    trace_.insert(trace_.end(), last.begin(), last.end());
    warn_if_not_written([&] { write_trace(options_.out / "trace.json", trace_, world_); });
    if (!leads())
        return;
    progress_->finish();
    const std::string layout = std::to_string(options_.ranks()) + " ranks: pp " +
                               std::to_string(options_.layout.pp) + ", dp " +
                               std::to_string(options_.layout.dp) + ", ep " +
                               std::to_string(options_.layout.ep) + ", " +
                               to_text(train_.precision) + " on " + device_->info().name;
    draw_losses(layout);
    RunSummary summary = summarize(log_->steps());
    if (report) {
        warn_if_not_written([&] {
            write_file_durably(options_.out / "report.svg",
                               report_svg(trainer_->schedule(), *report));
        });
        summary.pipeline = format_report(*report);
        summary.pairs = trainer_->pair_pattern();
        summary.pipeline_picture = options_.out / "report.svg";
    }
    summary.bytes_per_token = bytes_per_token_;
    summary.loss_picture = options_.out / "loss.svg";
    draw_experts(layout, summary);
    summary.trace = options_.out / "trace.json";
    summary.checkpoint = checkpoints_.last();
    summary.memory = describe_memory(device_->memory_report().peaks());
    results_.emplace(
        FinishedRun{std::move(summary), std::move(tokenizer_), std::move(*corpus_),
                    checkpoints_.has_saved() ? checkpoints_.last() : std::filesystem::path()});
}

int TrainRun::run() {
    for (std::uint64_t step = first_step_; step < train_.steps; ++step) {
        begin_trace(step);
        const StepAsks asked = one_step(step);
        // The first step compiled, too; the last one's trace is for the report.
        if (step == first_step_ + 1 && step + 1 < train_.steps && trainer_->measures_nodes()) {
            trace_ = take_trace();
            trainer_->order_nodes(trace_);
        }
        const bool last = step + 1 == train_.steps;
        stopped_ = asked.stop && !last;
        const bool due = train_.checkpoint_every > 0 && (step + 1) % train_.checkpoint_every == 0;
        if (last || stopped_ || due || asked.save)
            save(step + 1);
        if (stopped_)
            break;
    }
    finish();
    return !checkpoints_.has_saved() ? kExitNotSaved : stopped_ ? kExitStopped : kExitGood;
}

/// What to do about a wait that has run out, wherever on whichever rank. The message may name all
/// the work that was pending: its beginning says enough.
Error with_way_out(const Error& error, const TrainConfig& config) {
    constexpr std::size_t kMostDetail = 400;
    std::string detail = error.message();
    if (detail.size() > kMostDetail)
        detail = detail.substr(0, detail.rfind(' ', kMostDetail)) + " ...";
    std::ostringstream text;
    text << "no rank was lost; where the work is only slow, raise step_timeout in [train], now "
         << config.step_timeout << " seconds: " << detail;
    return Error(error.code(), text.str(), error.rank(), error.detail());
}

int run_in_world(const TrainOptions& options, std::optional<FinishedRun>& results) {
    return in_world([&](World& world) {
        if (static_cast<std::uint64_t>(world.size()) != options.ranks())
            throw Error(ErrorCode::InvalidArgument,
                        "the layout wants " + std::to_string(options.ranks()) +
                            " ranks, there are " + std::to_string(world.size()));
        TrainRun run(options, world);
        const int code = run.run();
        results = run.take_results();
        return code;
    });
}

} // namespace

int run_train(const TrainOptions& options) {
    std::optional<FinishedRun> results;
    int code = 0;
    try {
        code = run_in_world(options, results);
    } catch (const Error& error) {
        if (error.code() == ErrorCode::Timeout)
            throw with_way_out(error, options.config.train);
        throw;
    }
    // However long this takes, the other ranks have been let go.
    if (results && code == kExitGood)
        try_model(options, *results);
    if (is_launched())
        begin_phase(launched_rank(), "after closing", kEndLimit);
    if (results)
        print_finished_run(options, *results, code);
    return code;
}

} // namespace bellows
