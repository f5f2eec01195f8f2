// SPDX-License-Identifier: MIT
#include "pipeline/model_steps.hpp"

#include <bellows/run/kernels.hpp>
#include <bellows/train/trainer.hpp>

#include <algorithm>
#include <chrono>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace bellows::bench {

namespace {

/// Timed steps are to be alike: what is trained again and again on the same tokens sends more and
/// more of them to the same experts. From the third step on the rate is 0.
RunConfig with_few_updates(RunConfig config) {
    TrainConfig& train = config.train;
    train.lr = learning_rate(train, 2);
    train.lr_min = 0;
    train.warmup_steps = 0;
    train.decay_steps = StepCounts::kLeastWarmUp;
    return config;
}

/// The median of `steps` steps behind step `first`, each behind the one before: from one's return
/// to the next one's. All ranks come together in a step, so it is much the same on all.
double seconds_of_a_step(Stopwatch& watch, Device& device, Trainer& trainer,
                         const SequenceSource& source, std::uint64_t first, std::uint64_t steps) {
    device.wait_idle(kTimeLimit);
    watch.meet();
    trainer.step(first, source);
    std::vector<double> seconds;
    auto last = std::chrono::steady_clock::now();
    for (std::uint64_t step = 1; step <= steps; ++step) {
        trainer.step(first + step, source);
        const auto now = std::chrono::steady_clock::now();
        seconds.push_back(std::chrono::duration<double>(now - std::exchange(last, now)).count());
    }
    device.wait_idle(kTimeLimit);
    device.take_trace();
    return median_of(seconds);
}

} // namespace

ModelSteps run_model(Stopwatch& watch, Device& device, const RunConfig& config,
                     const StepCounts& counts) {
    const auto& [warm_up, steps] = counts;
    World& world = watch.world();
    const RunLayout layout =
        resolve_layout(config.model, config.train, static_cast<std::uint64_t>(world.size()));
    Trainer trainer(device, world, with_few_updates(config), layout,
                    named_kernels(config.train.precision));
    const auto source = [&](std::uint64_t, std::uint64_t index, std::span<std::uint32_t> tokens) {
        std::mt19937_64 random(index);
        for (std::uint32_t& token : tokens)
            token = static_cast<std::uint32_t>(random() % config.model.vocabulary);
    };
    std::vector<PipelineReport> reports;
    std::vector<double> seconds;
    ModelSteps all;
    all.schedule = trainer.schedule();
    for (std::uint64_t step = 0; step < warm_up + steps; ++step) {
        device.wait_idle(kTimeLimit);
        device.take_trace();
        watch.meet();
        const double origin =
            std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
                .count();
        const auto start = std::chrono::steady_clock::now();
        const StepResult result = trainer.step(step, source);
        device.wait_idle(kTimeLimit);
        double longest =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        all.events = device.take_trace();
        if (step + 2 == warm_up && trainer.measures_nodes())
            trainer.order_nodes(all.events);
        if (step < warm_up)
            continue;
        auto nanoseconds = static_cast<std::int64_t>(1e9 * longest);
        watch.host().all_reduce_max(std::span(&nanoseconds, 1));
        seconds.push_back(1e-9 * static_cast<double>(nanoseconds));
        reports.push_back(report_pipeline(world, all.schedule, layout, all.events, device,
                                          world.num_nodes() > 1 ? origin : 0));
        if (step == warm_up) // later ones carry more and more of what was rounded otherwise
            all.loss = result.loss;
        all.seconds_waited += result.seconds_waited / static_cast<double>(steps);
    }
    all.whole_ms = 1e3 * median_of(seconds);
    all.tokens_per_s = static_cast<double>(config.train.batch * config.train.seq) /
                       seconds_of_a_step(watch, device, trainer, source, warm_up + steps, steps);
    const auto off = [](const PipelineReport& report) {
        return report.measured.step_time / report.simulated.step_time - 1;
    };
    const auto median = [&](auto what) { return median_of(reports, what); };
    all.simulated_ms = median([](const PipelineReport& of) { return of.simulated.step_time; });
    all.measured_ms = median([](const PipelineReport& of) { return of.measured.step_time; });
    all.spread_ms =
        spread_of(reports, [](const PipelineReport& of) { return of.measured.step_time; });
    all.off = median(off);
    all.simulated_bubble = median([](const auto& of) { return of.simulated.bubble_share(); });
    all.measured_bubble = median([](const auto& of) { return of.measured.bubble_share(); });
    all.exchange_ms = median(&PipelineReport::exchange_ms);
    all.hidden_share = median(&PipelineReport::hidden_share);
    all.stalled_ms = median(&PipelineReport::stalled_ms);
    std::ranges::sort(reports, {}, off);
    all.report = std::move(reports[steps / 2]);
    all.pattern = trainer.pair_pattern();
    return all;
}

} // namespace bellows::bench
