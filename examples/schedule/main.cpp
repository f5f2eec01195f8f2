// SPDX-License-Identifier: MIT
// Pipeline schedules as plain data: makes one, verifies it, simulates it and prints what each rank
// does; then compares all kinds. Needs neither Vulkan nor MPI.
//
//   ./schedule [KIND [RANKS [MICRO_BATCHES]]]    e.g. ./schedule 1f1b 4 8; without: dualpipe 8 20

#include <bellows/base/error.hpp>
#include <bellows/schedule/schedule.hpp>
#include <bellows/schedule/simulate.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace {

/// What a rank's share of the model takes for one micro-batch, in any unit. A forward beside the
/// backward of another micro-batch takes less than both in turn: tokens of the one travel while the
/// other computes.
constexpr bellows::StageCosts kRankCosts{
    .forward = 1, .input_gradient = 1, .weight_gradient = 1, .pair = 2.5};

/// The costs are the same model's whatever the schedule: where a rank holds two chunks of it, each
/// has half of them.
double part_of_rank(const bellows::Schedule& schedule) {
    return static_cast<double>(schedule.num_ranks()) / static_cast<double>(schedule.num_stages);
}

/// Activations that the fullest rank keeps, in those of a rank's share of the model.
double peak_activations(const bellows::Schedule& schedule) {
    std::uint64_t most = 0;
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank)
        most = std::max(most, schedule.high_water(rank).activations);
    return static_cast<double>(most) * part_of_rank(schedule);
}

/// The schedule verified and simulated. Throws if it breaks a rule of verify(), or if its timeline
/// cannot be right: a rank is either busy or idle; in GPipe and 1F1B each rank idles while a
/// micro-batch passes the other ranks.
bellows::Timeline simulated(const bellows::ScheduleDesc& desc, const bellows::Schedule& schedule) {
    bellows::verify(schedule);
    bellows::SimulationOptions options;
    options.stages = {kRankCosts.scaled(part_of_rank(schedule))};
    const bellows::Timeline timeline = bellows::simulate(schedule, options);
    const bool known =
        desc.kind == bellows::ScheduleKind::GPipe || desc.kind == bellows::ScheduleKind::OneFOneB;
    const double bubble =
        static_cast<double>(desc.ranks - 1) * (kRankCosts.forward + kRankCosts.backward());
    const auto differ = [](double a, double b) { return !(std::abs(a - b) < 1e-9 * (1 + b)); };
    for (std::uint64_t rank = 0; rank < desc.ranks; ++rank)
        if (differ(timeline.busy[rank] + timeline.bubble[rank], timeline.step_time) ||
            (known && differ(timeline.bubble[rank], bubble)))
            throw bellows::Error(bellows::ErrorCode::Internal,
                                 schedule.name + ": wrong times on rank " + std::to_string(rank));
    return timeline;
}

/// The ops of each rank in their order: F forward, B backward, I input gradient, W weight gradient,
/// with the number of the chunk; & joins a pair that overlaps.
void print_ranks(const bellows::Schedule& schedule, const bellows::Timeline& timeline) {
    std::istringstream lines(to_text(schedule));
    std::string ops;
    for (std::uint64_t rank = 0; std::getline(lines, ops); ++rank)
        std::printf("rank %llu, idle for %.3g: %s\n", static_cast<unsigned long long>(rank),
                    timeline.bubble[rank], ops.c_str());
}

void compare_all(bellows::ScheduleDesc desc) {
    std::printf("kind         step time  bubble  activations  copies of the parameters\n");
    for (std::size_t kind = 0; kind < bellows::kNumScheduleKinds; ++kind) {
        desc.kind = static_cast<bellows::ScheduleKind>(kind);
        bellows::Schedule schedule;
        try {
            schedule = bellows::make_schedule(desc);
        } catch (const bellows::Error& error) { // not for so many ranks and micro-batches
            std::printf("%-12s %s\n", to_string(desc.kind), error.what());
            continue;
        }
        const bellows::Timeline timeline = simulated(desc, schedule);
        std::printf("%-12s %9.4g %5.1f %% %12.3g %25llu\n", to_string(desc.kind),
                    timeline.step_time, 100 * timeline.bubble_share(), peak_activations(schedule),
                    static_cast<unsigned long long>(schedule.num_streams));
    }
}

} // namespace

int main(int argc, char** argv) {
    bellows::ScheduleDesc desc;
    bellows::Schedule schedule;
    try {
        desc.kind = bellows::parse_schedule_kind(argc > 1 ? argv[1] : "dualpipe");
        desc.ranks = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 8;
        desc.micro_batches = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 20;
        schedule = bellows::make_schedule(desc);
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "schedule: %s\n", error.what());
        return 2;
    }
    try {
        const bellows::Timeline timeline = simulated(desc, schedule);
        print_ranks(schedule, timeline);
        std::printf("\n%s: step time %.4g, bubble %.1f %%, peak activations %.3g\n\n",
                    schedule.name.c_str(), timeline.step_time, 100 * timeline.bubble_share(),
                    peak_activations(schedule));
        compare_all(desc);
        return 0;
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "schedule: %s\n", error.what());
        return 1;
    }
}
