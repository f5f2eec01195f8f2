// SPDX-License-Identifier: MIT
// Pipeline schedules as the executor runs them among ranks, on stages that take a set time and hold
// no core: how long a step takes beside what the simulator says. `--help` lists the options.

#include "app/pictures/pipeline_report.hpp"
#include "app/pictures/schedule_report.hpp"
#include "app/trace_file.hpp"
#include "pipeline/model_steps.hpp"
#include "pipeline/timed_stage.hpp"
#include "ranks/ranks.hpp"
#include "ranks/timing.hpp"
#include "support/common_options.hpp"
#include "support/program.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/comm/pipe.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/pipeline/measure.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace bellows::bench {
namespace {

const char* const kHelp =
    R"(bench_pipeline: steps of pipeline schedules among ranks, through the program's own mpirun or among the ranks of the
mpirun or srun that started it: on stages whose ops take a set time without a core, so that more ranks than cores serve, or,
with --config, on a model that trains.

  --ranks N              in all (default 4)
  --micro-batches N      of both directions together (default: four times as many as ranks)
  --kinds K,...          schedules (default: all that are possible); bellows schedule --help
  --costs f=F,i=I,w=W    ms of a rank's share of the model, of which a chunk takes its part; p2p=L for the simulator
                         alone (default f=20,i=20,w=20)
  --svg FILE             a picture of the last kind's last step as measured, of a model the step that is off by the median
of a model:
  --config NAME          a preset or a file, as `bellows train` takes it, with all that is not said here
  --pp P, --ep E         as there (default: all ranks; all that stand at a rank of the pipeline)
  --batch N              sequences of a step, over all ranks (default: the configuration's)
  --warm-up N            steps ahead of the timed ones (default 3, the least); weights stay from the third on, routers'
                         biases do not: some hundred steps balance the experts, as in long runs
  --precision f32|bf16|fp8, --device-link auto|off, --pairs auto|apart|PATTERN
  --trace FILE           of all ranks in the last kind's last step, optimiser included, for Perfetto
  BELLOWS_FP8_VARIANTS and BELLOWS_BF16_VARIANTS name variants of products, e.g. "decoded" or, of bf16, "direct"

Rows are named by their schedule. --repeats counts steps behind one that is not timed, of a model behind the warm-up
(default 3); least and largest are of a step as measured.

simulated, measured    ms of a step. Pairs of timed stages run one half after the other; input gradients leave before weight
                       gradients are made. Each step of a model is simulated with the costs that it was measured to have
off                    how much longer it took than simulated
bubble                 what the rank that idles most idles, as a share of the step
whole                  ms of a step of a model by itself with the update of the weights, until devices and network are idle
tokens/s               of steps one behind the other, as in training: a step begins while the update before is under way
hidden                 how much of the time in which experts' tokens travel other work runs
stalled                ms of a step in which a rank computes nothing, mean of all
waited                 ms that a rank's exchanges, reductions and pipes did nothing but wait in a step, added up
Of a model all but tokens/s are of steps by themselves. All are medians but for what is waited (mean) and the loss (of the
first timed step); of timed stages those of the step of median time.
A run is checked: every micro-batch has gone through every stage and back, gradients are summed in order; all schedules
bring a model to the same loss in the first step that is timed, but for rounding.
Exit codes: 0 all right, 1 a wrong result, 2 bad usage, 3 no device or MPI that serves, 4 a lost rank.
)";

struct Options {
    std::uint64_t ranks = 4, micro_batches = 0, repeats = 3;
    std::uint64_t warm_up = StepCounts::kLeastWarmUp; ///< of a model
    std::vector<ScheduleKind> kinds;                  ///< empty: all
    SimulationOptions costs;                          ///< in ms
    CommonOptions common;
    std::optional<std::string> svg, trace;
    std::optional<RunConfig> model;
};

/// --config and what goes with it.
std::optional<RunConfig> take_model(Arguments& arguments, Options& options, bool micro_batches) {
    const auto name = arguments.value("--config");
    if (!name)
        return std::nullopt;
    options.warm_up = arguments.number("--warm-up", options.warm_up, options.warm_up, 1 << 16);
    RunConfig config = load_run_config(*name);
    TrainConfig& train = config.train;
    train.pp = arguments.number("--pp", options.ranks, 1, options.ranks);
    train.dp = 0;
    train.ep = arguments.number("--ep", 0, 0, options.ranks);
    train.batch = arguments.number("--batch", train.batch, 1, 1 << 30);
    if (micro_batches)
        train.micro_batches = options.micro_batches;
    if (const auto precision = arguments.value("--precision"))
        from_text(train.precision, *precision);
    if (const auto link = arguments.value("--device-link"))
        train.device_link = device_link_kind(*link);
    if (const auto pairs = arguments.value("--pairs"))
        train.pairs = parse_pair_mode(*pairs);
    train.clip_norm = 0; // the norm is summed in another order under each schedule
    validate(train);
    return config;
}

Options take_options(int argc, char** argv) {
    Arguments arguments(argc, argv);
    Options options;
    const std::uint64_t launched = is_launched() ? static_cast<std::uint64_t>(launched_size()) : 0;
    options.ranks = arguments.number("--ranks", launched > 0 ? launched : options.ranks, 1, 4096);
    options.micro_batches = arguments.number("--micro-batches", 0, 0, 1 << 16);
    const bool micro_batches = options.micro_batches > 0;
    if (!micro_batches)
        options.micro_batches = 4 * options.ranks;
    options.common = take_common_options(arguments);
    options.repeats = options.common.repeats.value_or(options.repeats);
    if (const auto kinds = arguments.value("--kinds"))
        for (const std::string& kind : Arguments::split(*kinds))
            options.kinds.push_back(parse_schedule_kind(kind));
    options.costs = parse_costs(arguments.value("--costs").value_or("f=20,i=20,w=20"));
    if (options.costs.stages.size() != 1 || options.costs.stages.front().pair)
        throw Error(ErrorCode::InvalidArgument,
                    "--costs takes f, i, w and p2p, the same for all stages");
    options.svg = arguments.value("--svg");
    options.model = take_model(arguments, options, micro_batches);
    if (options.model)
        options.trace = arguments.value("--trace");
    if (arguments.rest().size() > 1)
        throw Error(ErrorCode::InvalidArgument,
                    "there is no option " + arguments.rest()[1] + "; see --help");
    return options;
}

struct Result {
    std::string kind, impossible;
    Spread spread; ///< of what is measured
    double simulated = 0, measured = 0, off = 0, simulated_bubble = 0, measured_bubble = 0;
    // Of a model:
    double whole_ms = 0, tokens_per_s = 0, hidden = 0, waited_ms = 0, exchange_ms = 0,
           stalled_ms = 0, loss = 0;
    std::string pattern;
};

/// One kind on all ranks.
class Run {
public:
    Run(Stopwatch& watch, Device& device, Schedule schedule, const SimulationOptions& costs)
        : watch_(watch), schedule_(std::move(schedule)),
          rank_(static_cast<std::uint64_t>(watch.world().rank())),
          activations_transport_(open_transport(watch.world(), {.device = &device})),
          gradients_transport_(open_transport(watch.world(), {.device = &device})),
          thread_(device, "host"),
          activations_(device, watch.world(), *activations_transport_, thread_),
          gradients_(device, watch.world(), *gradients_transport_, thread_),
          lane_(thread_.add_lane("stages")), device_(device) {
        const StageCosts seconds = costs.stages.front().scaled(1e-3);
        std::vector<PipelineChunk*> chunks;
        for (std::uint32_t phase = 0; phase < schedule_.chunks[rank_].size(); ++phase) {
            stages_.push_back(
                std::make_unique<TimedStage>(device, lane_, schedule_, rank_, phase, seconds));
            chunks.push_back(stages_.back().get());
        }
        std::vector<int> world_ranks;
        for (int rank = 0; rank < watch.world().size(); ++rank)
            world_ranks.push_back(rank);
        executor_ = std::make_unique<PipelineExecutor>(device, schedule_, rank_,
                                                       std::move(world_ranks), std::move(chunks),
                                                       PipelinePipes{&activations_, &gradients_});
    }

    /// A step; the times of all ranks' ops in ms.
    Timeline step() {
        watch_.meet();
        device_.take_trace();
        // Since when: hosts have clocks of their own.
        const double begin =
            std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
                .count();
        executor_->run();
        ++steps_;
        for (const auto& stage : stages_)
            if (stage->sum() != stage->expected_sum(steps_))
                throw Error(ErrorCode::Internal,
                            schedule_.name + ": a stage has summed other gradients than its own",
                            static_cast<int>(rank_));
        std::vector<OpTime> mine = times_of_rank(schedule_, rank_, device_.take_trace()).ops;
        for (OpTime& time : mine)
            time = {1e3 * (time.start - begin), 1e3 * (time.end - begin)};
        std::vector<std::vector<OpTime>> all;
        for (const auto& part : watch_.host().all_gather(std::as_bytes(std::span(mine)))) {
            std::vector<OpTime> times(part.size() / sizeof(OpTime));
            std::memcpy(times.data(), part.data(), part.size());
            all.push_back(std::move(times));
        }
        return timeline_of(from_zero(std::move(all)));
    }

private:
    Stopwatch& watch_;
    Schedule schedule_;
    std::uint64_t rank_, steps_ = 0;
    std::vector<std::unique_ptr<TimedStage>> stages_; ///< jobs of the thread use them
    std::unique_ptr<Transport> activations_transport_, gradients_transport_;
    HostThread thread_;
    Pipe activations_, gradients_;
    Lane lane_;
    Device& device_;
    std::unique_ptr<PipelineExecutor> executor_;
};

Result measure(Stopwatch& watch, Device& device, const Options& options, ScheduleKind kind) {
    Result result;
    result.kind = to_string(kind);
    Schedule schedule;
    try {
        schedule = make_schedule({kind, options.ranks, options.micro_batches});
    } catch (const Error& error) {
        result.impossible = error.message();
        return result;
    }
    SimulationOptions costs = options.costs;
    const double part =
        static_cast<double>(options.ranks) / static_cast<double>(schedule.num_stages);
    StageCosts& of = costs.stages.front();
    of = of.scaled(part);
    schedule = split_backwards(decouple_pairs(schedule, costs)); // as training runs it
    const Timeline simulated = simulate(schedule, costs);
    Run run(watch, device, schedule, costs);
    run.step();
    std::vector<Timeline> measured;
    for (std::uint64_t repeat = 0; repeat < options.repeats; ++repeat)
        measured.push_back(run.step());
    if (options.svg && watch.world().rank() == 0)
        write_file_durably(*options.svg, schedule_svg(schedule, measured.back(), "measured", "ms"));
    std::ranges::sort(measured, {}, &Timeline::step_time);
    const Timeline& median = measured[measured.size() / 2];
    result.simulated = simulated.step_time;
    result.measured = median.step_time;
    result.spread = spread_of(measured, &Timeline::step_time);
    result.off = result.measured / result.simulated - 1;
    result.simulated_bubble = simulated.bubble_share();
    result.measured_bubble = median.bubble_share();
    return result;
}

Result measure_model(Stopwatch& watch, Device& device, const Options& options, ScheduleKind kind) {
    Result result;
    result.kind = to_string(kind);
    RunConfig config = *options.model;
    config.train.pipeline = kind;
    try {
        (void)resolve_layout(config.model, config.train, options.ranks);
    } catch (const Error& error) {
        result.impossible = error.message();
        return result;
    }
    const ModelSteps steps = run_model(watch, device, config, {options.warm_up, options.repeats});
    if (options.svg && watch.world().rank() == 0)
        write_file_durably(*options.svg, report_svg(steps.schedule, steps.report));
    if (options.trace)
        write_trace(*options.trace, steps.events, watch.world());
    result.simulated = steps.simulated_ms;
    result.measured = steps.measured_ms;
    result.spread = steps.spread_ms;
    result.off = steps.off;
    result.simulated_bubble = steps.simulated_bubble;
    result.measured_bubble = steps.measured_bubble;
    result.whole_ms = steps.whole_ms;
    result.tokens_per_s = steps.tokens_per_s;
    result.hidden = steps.hidden_share;
    result.exchange_ms = steps.exchange_ms;
    result.stalled_ms = steps.stalled_ms;
    result.waited_ms = 1e3 * steps.seconds_waited;
    result.loss = steps.loss;
    result.pattern = steps.pattern;
    return result;
}

void print(const Result& result, bool of_model) {
    if (!result.impossible.empty()) {
        std::printf("%-12s %s\n", result.kind.c_str(), result.impossible.c_str());
    } else {
        std::printf("%-12s %10.1f %10.1f %15s %+7.1f %% %9.1f %% %9.1f %%", result.kind.c_str(),
                    result.simulated, result.measured, range_text(result.spread).c_str(),
                    100 * result.off, 100 * result.simulated_bubble, 100 * result.measured_bubble);
        if (of_model)
            std::printf(" %8.1f %10.0f %7.1f %% of %7.1f %8.1f %8.1f %10.6f", result.whole_ms,
                        result.tokens_per_s, 100 * result.hidden, result.exchange_ms,
                        result.stalled_ms, result.waited_ms, result.loss);
        std::printf("\n");
        if (!result.pattern.empty())
            std::printf("             %s\n", result.pattern.c_str());
    }
    std::fflush(stdout);
}

void print_titles(const Options& options) {
    if (options.model) {
        const TrainConfig& train = options.model->train;
        std::printf("a model of %llu x %llu in %s, %llu ranks, pp %llu, batch %llu x %llu\n",
                    static_cast<unsigned long long>(options.model->model.layers),
                    static_cast<unsigned long long>(options.model->model.hidden),
                    to_text(train.precision), static_cast<unsigned long long>(options.ranks),
                    static_cast<unsigned long long>(train.pp),
                    static_cast<unsigned long long>(train.batch),
                    static_cast<unsigned long long>(train.seq));
    } else {
        const StageCosts& costs = options.costs.stages.front();
        std::printf("%llu ranks, %llu micro-batches; ms of a rank's share: forward %g, input "
                    "gradient %g, weight gradient %g\n",
                    static_cast<unsigned long long>(options.ranks),
                    static_cast<unsigned long long>(options.micro_batches), costs.forward,
                    costs.input_gradient, costs.weight_gradient);
    }
    std::printf("%-12s %10s %10s %15s %9s %11s %11s", "schedule", "simulated", "measured",
                "min-max", "off", "bubble", "measured");
    if (options.model)
        std::printf(" %8s %10s %20s %8s %8s %10s", "whole", "tokens/s", "hidden of ms", "stalled",
                    "waited", "loss");
    std::printf("\n");
}

nlohmann::ordered_json json_of(const Result& result) {
    if (!result.impossible.empty())
        return {{"kind", result.kind}, {"impossible", result.impossible}};
    nlohmann::ordered_json json = {{"kind", result.kind},
                                   {"simulated_ms", result.simulated},
                                   {"measured_ms", result.measured},
                                   {"min_ms", result.spread.least},
                                   {"max_ms", result.spread.most},
                                   {"off", result.off},
                                   {"simulated_bubble", result.simulated_bubble},
                                   {"measured_bubble", result.measured_bubble}};
    if (result.tokens_per_s > 0)
        json.update({{"whole_ms", result.whole_ms},
                     {"tokens_per_s", result.tokens_per_s},
                     {"exchange_ms", result.exchange_ms},
                     {"hidden", result.hidden},
                     {"stalled_ms", result.stalled_ms},
                     {"waited_ms", result.waited_ms},
                     {"loss", result.loss},
                     {"pattern", result.pattern}});
    return json;
}

std::string run_all(World& world, const Options& options) {
    const bool leads = world.rank() == 0;
    const std::string name =
        options.common.device.value_or(options.model ? options.model->train.device : kAnyDevice);
    DeviceOptions of_device = device_options_of_rank(name, world.local_rank());
    of_device.trace = true;
    const auto device = Device::create(of_device);
    Stopwatch watch(world);
    std::vector<ScheduleKind> kinds = options.kinds;
    for (std::size_t kind = 0; options.kinds.empty() && kind < kNumScheduleKinds; ++kind)
        kinds.push_back(static_cast<ScheduleKind>(kind));
    std::erase_if(kinds, [&](ScheduleKind kind) { return !options.common.wants(to_string(kind)); });
    if (kinds.empty())
        throw Error(ErrorCode::InvalidArgument, "--filter matches no schedule");
    if (leads)
        print_titles(options);
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    std::optional<double> loss;
    for (const ScheduleKind kind : kinds) {
        const Result result = options.model ? measure_model(watch, *device, options, kind)
                                            : measure(watch, *device, options, kind);
        if (leads)
            print(result, options.model.has_value());
        all.push_back(json_of(result));
        if (!options.model || !result.impossible.empty())
            continue;
        if (!loss)
            loss = result.loss;
        if (!(std::abs(result.loss - *loss) <= 1e-3 * *loss)) // the same on all ranks
            return result.kind + " has come to another loss than the first schedule";
    }
    if (leads && options.common.json)
        write_file_durably(*options.common.json, all.dump(1) + "\n");
    return "";
}

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    using namespace bellows::bench;
    return run_ranks("bench_pipeline", kHelp, argc, argv, &take_options, &run_all);
}
