// SPDX-License-Identifier: MIT
#include <bellows/pipeline/measure.hpp>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

namespace bellows {

namespace {

constexpr double kSeconds = 1e-9;

OpTime time_of(const TraceEvent& event) {
    return {kSeconds * static_cast<double>(event.begin_ns),
            kSeconds * static_cast<double>(event.end_ns)};
}

/// Ascending, those that touch as one.
std::vector<OpTime> joined(std::vector<OpTime> times) {
    std::ranges::sort(times, {}, &OpTime::start);
    std::vector<OpTime> apart;
    for (const OpTime& time : times)
        if (apart.empty() || time.start > apart.back().end)
            apart.push_back(time);
        else
            apart.back().end = std::max(apart.back().end, time.end);
    return apart;
}

/// Of two lists of joined().
double length_of_both(const std::vector<OpTime>& a, const std::vector<OpTime>& b) {
    double length = 0;
    for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
        length += std::max(0.0, std::min(x->end, y->end) - std::max(x->start, y->start));
        (x->end < y->end ? x : y)++;
    }
    return length;
}

void extend(std::optional<OpTime>& whole, const OpTime& time) {
    whole =
        whole ? OpTime{std::min(whole->start, time.start), std::max(whole->end, time.end)} : time;
}

double mean(const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

enum Cost : std::size_t { kForward, kInputGradient, kWeightGradient, kBackward, kPair, kNumCosts };

using Means = std::array<std::optional<double>, kNumCosts>;

Cost cost_of(const ScheduleOp& op) {
    switch (op.kind) {
    case OpKind::Forward:
        return op.with_next ? kPair : kForward;
    case OpKind::Backward:
        return kBackward;
    case OpKind::InputGradient:
        return kInputGradient;
    case OpKind::WeightGradient:
        return kWeightGradient;
    }
    return kForward;
}

/// An op, or a pair, as it ran.
struct Sample {
    std::uint64_t stage = 0;
    Cost cost = kForward;
    OpTime time;
    double seconds = 0; ///< that it kept its row for
    double beside = 0;  ///< of these, while the other row ran
};

/// One behind the other: those that ran while another did begin when that ends.
void put_apart(std::vector<Sample>& row) {
    std::ranges::sort(row, {}, [](const Sample& sample) { return sample.time.end; });
    double until = -std::numeric_limits<double>::infinity();
    for (Sample& sample : row) {
        sample.time.start = std::min(std::max(until, sample.time.start), sample.time.end);
        sample.seconds = sample.time.end - sample.time.start;
        until = std::max(until, sample.time.end);
    }
}

void note_beside(std::vector<Sample>& row, const std::vector<Sample>& other) {
    std::vector<OpTime> times;
    for (const Sample& sample : other)
        times.push_back(sample.time);
    times = joined(std::move(times));
    for (Sample& sample : row)
        sample.beside = length_of_both({sample.time}, times);
}

/// A rank's rows of work.
struct Rows {
    std::vector<Sample> others, weight_gradients;
};

/// What each op and pair kept its row for. two: weight gradients behind the first stage have one of
/// their own, from their input gradients' ends on.
Rows rows_of(const Schedule& schedule, const Timeline& measured, std::uint64_t rank, bool two) {
    const auto& ops = schedule.ops[rank];
    const auto& times = measured.ops[rank];
    Rows rows;
    std::map<std::pair<std::uint32_t, std::uint64_t>, double> ready;
    for (std::size_t i = 0; i < ops.size(); ++i) {
        const ScheduleOp& op = ops[i];
        Sample sample{schedule.chunk_of(rank, op).stage, cost_of(op), times[i]};
        if (op.kind == OpKind::InputGradient)
            ready[{op.phase, op.micro_batch}] = sample.time.end;
        if (two && op.kind == OpKind::WeightGradient && sample.stage > 0) {
            sample.time.start = std::max(sample.time.start, ready[{op.phase, op.micro_batch}]);
            rows.weight_gradients.push_back(sample);
            continue;
        }
        if (sample.cost == kPair) {
            const OpTime& other = times[++i];
            sample.time = {std::min(sample.time.start, other.start),
                           std::max(sample.time.end, other.end)};
        }
        rows.others.push_back(sample);
    }
    put_apart(rows.others);
    put_apart(rows.weight_gradients);
    note_beside(rows.others, rows.weight_gradients);
    note_beside(rows.weight_gradients, rows.others);
    return rows;
}

/// Whether ops other than weight gradients ran beside each other, as those of two directions do on
/// a queue each.
bool others_ran_at_once(const Schedule& schedule, const Timeline& measured) {
    constexpr double kMost = 0.05; // of their time
    double all = 0, apart = 0;
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank) {
        std::vector<OpTime> times;
        for (std::size_t i = 0; i < schedule.ops[rank].size(); ++i)
            if (schedule.ops[rank][i].kind != OpKind::WeightGradient)
                times.push_back(measured.ops[rank][i]);
        all += length_of(times);
        apart += length_of(joined(std::move(times)));
    }
    return all > (1 + kMost) * apart;
}

/// Of those that ran beside the other row, from how much longer they took than their like that did
/// not: each such second makes them longer by what is missing of a row's share. Sums of both, so
/// that what differs by chance evens out. Without the one or the other a half.
double share_of(const std::vector<Rows>& ranks, std::vector<Sample> Rows::* row) {
    constexpr double kAlone = 0.02, kBeside = 0.2; // of an op's time
    constexpr double kLeastShare = 0.05;
    std::map<std::pair<std::uint64_t, Cost>, std::vector<const Sample*>> alike;
    for (const Rows& rows : ranks)
        for (const Sample& sample : rows.*row)
            alike[{sample.stage, sample.cost}].push_back(&sample);
    double longer = 0, beside = 0;
    for (const auto& [what, samples] : alike) {
        std::vector<double> alone;
        for (const Sample* sample : samples)
            if (sample->beside <= kAlone * sample->seconds)
                alone.push_back(sample->seconds);
        if (alone.empty())
            continue;
        const double usual = mean(alone);
        for (const Sample* sample : samples)
            if (sample->beside > kBeside * sample->seconds) {
                longer += sample->seconds - usual;
                beside += sample->beside;
            }
    }
    return beside > 0 ? std::clamp(1 - longer / beside, kLeastShare, 1.0) : 0.5;
}

/// What a stage has no sample of: the mean of the others'.
void fill_in(std::vector<Means>& stages) {
    for (std::size_t cost = 0; cost < kNumCosts; ++cost) {
        double sum = 0;
        std::size_t count = 0;
        for (const Means& stage : stages)
            if (stage[cost]) {
                sum += *stage[cost];
                ++count;
            }
        for (Means& stage : stages)
            if (!stage[cost] && count > 0)
                stage[cost] = sum / static_cast<double>(count);
    }
}

StageCosts costs_of_stage(const Means& means) {
    StageCosts costs;
    costs.pair = means[kPair];
    // Where all are parts of pairs, thirds of one serve as well as any shares.
    const double third = means[kPair].value_or(0) / 3;
    costs.forward = means[kForward].value_or(third);
    const double backward = means[kBackward].value_or(2 * third);
    costs.input_gradient = means[kInputGradient].value_or(
        std::max(0.0, backward - means[kWeightGradient].value_or(backward / 2)));
    costs.weight_gradient =
        means[kWeightGradient].value_or(std::max(0.0, backward - costs.input_gradient));
    return costs;
}

double smallest_latency(const Schedule& schedule, const Timeline& measured) {
    std::map<std::array<std::uint64_t, 3>, std::pair<std::uint64_t, double>> made;
    const auto visit = [&](const auto& use) {
        for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank)
            for (std::size_t i = 0; i < schedule.ops[rank].size(); ++i) {
                const ScheduleOp& op = schedule.ops[rank][i];
                if (op.kind != OpKind::WeightGradient)
                    use(rank, op, schedule.chunk_of(rank, op).stage, measured.ops[rank][i]);
            }
    };
    visit([&](std::uint64_t rank, const ScheduleOp& op, std::uint64_t stage, const OpTime& time) {
        made[{op.kind == OpKind::Forward, stage, op.micro_batch}] = {rank, time.end};
    });
    std::optional<double> smallest;
    visit([&](std::uint64_t rank, const ScheduleOp& op, std::uint64_t stage, const OpTime& time) {
        const bool forward = op.kind == OpKind::Forward;
        const auto from = made.find({forward, forward ? stage - 1 : stage + 1, op.micro_batch});
        if (from == made.end() || from->second.first == rank)
            return;
        const double latency = std::max(0.0, time.start - from->second.second);
        smallest = std::min(smallest.value_or(latency), latency);
    });
    return smallest.value_or(0);
}

} // namespace

double length_of(const std::vector<OpTime>& times) {
    double length = 0;
    for (const OpTime& time : times)
        length += time.end - time.start;
    return length;
}

RankTimes times_of_rank(const Schedule& schedule, std::uint64_t rank,
                        std::span<const TraceEvent> events) {
    std::map<std::string, std::optional<OpTime>> works;
    for (const ScheduleOp& op : schedule.ops[rank])
        for (const OpKind kind : {op.kind == OpKind::Backward ? OpKind::InputGradient : op.kind,
                                  op.kind == OpKind::Backward ? OpKind::WeightGradient : op.kind})
            works[to_name({kind, op.phase, op.micro_batch})];
    std::vector<OpTime> jobs, own;
    for (const TraceEvent& event : events) {
        const auto work = works.find(event.op);
        if (work == works.end())
            continue;
        const OpTime time = time_of(event);
        extend(work->second, time);
        if (event.is_job())
            jobs.push_back(time);
        else if (event.by.empty())
            own.push_back(time);
    }
    RankTimes times;
    double until = works.empty() ? 0 : std::numeric_limits<double>::infinity();
    for (const auto& [op, work] : works)
        until = std::min(until, work ? work->start : until);
    if (until == std::numeric_limits<double>::infinity())
        until = 0; // there was no work
    for (const ScheduleOp& op : schedule.ops[rank]) {
        std::optional<OpTime> whole;
        for (const OpKind kind : {OpKind::Forward, OpKind::InputGradient, OpKind::WeightGradient}) {
            const bool half = op.kind == OpKind::Backward && kind != OpKind::Forward;
            const auto work = works.find(to_name({kind, op.phase, op.micro_batch}));
            if ((half || kind == op.kind) && work->second)
                extend(whole, *work->second);
        }
        times.ops.push_back(whole.value_or(OpTime{until, until}));
        until = std::max(until, times.ops.back().end);
    }
    times.exchange = joined(std::move(jobs));
    own = joined(std::move(own));
    times.hidden = length_of_both(times.exchange, own);
    std::optional<OpTime> all;
    for (const OpTime& op : times.ops)
        extend(all, op);
    if (all)
        times.stalled = all->end - all->start - length_of_both({*all}, own);
    return times;
}

SimulationOptions costs_of(const Schedule& schedule, const Timeline& measured,
                           bool weight_gradients_beside) {
    const bool two = weight_gradients_beside && !others_ran_at_once(schedule, measured);
    std::vector<Rows> ranks;
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank)
        ranks.push_back(rows_of(schedule, measured, rank, two));
    SimulationOptions options;
    if (two)
        options.rows = {share_of(ranks, &Rows::weight_gradients), share_of(ranks, &Rows::others)};
    const RowShares shares = options.rows.value_or(RowShares{});
    std::vector<std::vector<Sample>> samples; // of each rank; `seconds` are those of an op alone
    for (Rows& rows : ranks) {
        std::vector<Sample>& all = samples.emplace_back();
        for (const auto& [row, share] : {std::pair{&rows.others, shares.others},
                                         {&rows.weight_gradients, shares.weight_gradients}})
            for (Sample& sample : *row) {
                sample.seconds -= (1 - share) * sample.beside;
                all.push_back(sample);
            }
    }
    std::vector<std::array<std::vector<double>, kNumCosts>> seconds(schedule.num_stages);
    for (const auto& of_rank : samples)
        for (const Sample& sample : of_rank)
            seconds[sample.stage][sample.cost].push_back(sample.seconds);
    std::vector<Means> stages(schedule.num_stages);
    for (std::uint64_t stage = 0; stage < schedule.num_stages; ++stage)
        for (std::size_t cost = 0; cost < kNumCosts; ++cost)
            if (!seconds[stage][cost].empty())
                stages[stage][cost] = mean(seconds[stage][cost]);
    options.p2p_latency = smallest_latency(schedule, measured);
    for (const auto& of_rank : samples) {
        double is = 0, usual = 0;
        for (const Sample& sample : of_rank) {
            is += sample.seconds;
            usual += *stages[sample.stage][sample.cost];
        }
        options.slowness.push_back(usual > 0 ? is / usual : 1);
    }
    fill_in(stages);
    options.stages.clear();
    for (const Means& means : stages)
        options.stages.push_back(costs_of_stage(means));
    return options;
}

} // namespace bellows
