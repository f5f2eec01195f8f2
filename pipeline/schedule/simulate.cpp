// SPDX-License-Identifier: MIT
#include <bellows/base/error.hpp>
#include <bellows/schedule/simulate.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

namespace bellows {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class Simulation {
public:
    /// decouple: pairs, whose order swapped() tells then.
    Simulation(const Schedule& schedule, const SimulationOptions& options, bool decouple = false)
        : schedule_(schedule), options_(options), decouple_(decouple),
          places_(chunk_places(schedule)),
          activations_(schedule.num_stages * schedule.num_micro_batches, kNever),
          gradients_(activations_), next_(schedule.num_ranks()), free_(schedule.num_ranks()) {
        for (const auto& ops : schedule.ops)
            times_.emplace_back(ops.size());
        for (std::uint64_t rank = 0; options.rows && rank < schedule.num_ranks(); ++rank)
            rows_.push_back(make_row(rank));
    }

    Timeline run() {
        for (bool progress = true; std::exchange(progress, false);)
            for (std::uint64_t rank = 0; rank < schedule_.num_ranks(); ++rank)
                while (next_[rank] < schedule_.ops[rank].size() && step(rank))
                    progress = true;
        for (std::uint64_t rank = 0; rank < rows_.size(); ++rank)
            advance_row(rank, kNever, 1);
        bool all = std::ranges::equal(next_, schedule_.ops, {}, {},
                                      [](const auto& ops) { return ops.size(); });
        Timeline timeline = timeline_of(std::move(times_));
        const auto finite = [](const OpTime& time) {
            return std::isfinite(time.start) && std::isfinite(time.end);
        };
        for (const auto& of_rank : timeline.ops)
            all = all && std::ranges::all_of(of_rank, finite);
        for (const Row& row : rows_)
            all = all && row.next == row.works.size();
        if (!all)
            throw Error(ErrorCode::InvalidArgument,
                        "no simulation: costs add up to no finite time");
        timeline.messages = messages_;
        return timeline;
    }

    /// The second halves that have run first: (rank, op).
    const std::vector<std::pair<std::uint64_t, std::size_t>>& swapped() const { return swapped_; }

private:
    const StageCosts& costs(std::uint64_t stage) const {
        return options_.stages[options_.stages.size() == 1 ? 0 : stage];
    }
    std::uint64_t slot(std::uint64_t stage, const ScheduleOp& op) const {
        return stage * schedule_.num_micro_batches + op.micro_batch;
    }
    double slowness(std::uint64_t rank) const {
        return options_.slowness.empty() ? 1 : options_.slowness[rank];
    }
    double cost(std::uint64_t rank, const ScheduleOp& op) const {
        return slowness(rank) * cost(costs(schedule_.chunk_of(rank, op).stage), op);
    }
    static double cost(const StageCosts& of, const ScheduleOp& op) {
        switch (op.kind) {
        case OpKind::Forward:
            return of.forward;
        case OpKind::Backward:
            return of.backward();
        case OpKind::InputGradient:
            return of.input_gradient;
        case OpKind::WeightGradient:
            return of.weight_gradient;
        }
        return 0;
    }
    /// When what the op needs of others is there.
    double ready(std::uint64_t rank, const ScheduleOp& op) const {
        const std::uint64_t stage = schedule_.chunk_of(rank, op).stage;
        switch (op.kind) {
        case OpKind::Forward:
            return stage == 0 ? 0 : activations_[slot(stage - 1, op)];
        case OpKind::Backward:
        case OpKind::InputGradient:
            // A last stage's own forward has ended before, as it stands before.
            return stage + 1 == schedule_.num_stages ? 0 : gradients_[slot(stage + 1, op)];
        case OpKind::WeightGradient:
            return 0;
        }
        return kNever;
    }

    /// When the neighbour's rank has a result that is made at `time`.
    double arrival(std::uint64_t rank, std::uint64_t stream, std::uint64_t to_stage, double time) {
        const std::uint64_t to = places_[stream][to_stage].rank;
        if (to == rank)
            return time;
        ++messages_;
        double& link = links_[{rank, to}];
        link = std::max(link, time) + options_.p2p_transfer;
        return link + options_.p2p_latency;
    }

    /// A rank's weight gradients with a row of their own, in their order.
    struct Row {
        struct Work {
            std::size_t op = 0;
            double ready = kNever, left = 0, end = kNever;
            bool begun = false;
        };
        std::vector<Work> works;
        std::size_t next = 0; ///< the first that has not ended
        double time = 0;      ///< until when it has run
        /// Of each input gradient, and of each forward the one that holds its place, if any.
        std::map<std::size_t, std::size_t> work_of_op;
    };

    Row make_row(std::uint64_t rank) const {
        const auto& ops = schedule_.ops[rank];
        Row row;
        std::map<std::pair<std::uint32_t, std::uint64_t>, std::size_t> works; // by micro-batch
        std::vector<std::uint64_t> places;                                    // of each phase
        for (std::uint64_t phase = 0; phase < schedule_.chunks[rank].size(); ++phase)
            places.push_back(schedule_.peak_in_flight(rank, phase));
        for (std::size_t i = 0; i < ops.size(); ++i)
            if (in_row(rank, ops[i])) {
                works[{ops[i].phase, ops[i].micro_batch}] = row.works.size();
                row.works.push_back({i, kNever, cost(rank, ops[i])});
            }
        for (std::size_t i = 0; i < ops.size(); ++i) {
            std::uint64_t of = ops[i].micro_batch;
            if (ops[i].kind == OpKind::Forward)
                of -= places[ops[i].phase]; // of the first ones no micro-batch, as it is unsigned
            else if (ops[i].kind != OpKind::InputGradient)
                continue;
            if (const auto work = works.find({ops[i].phase, of}); work != works.end())
                row.work_of_op[i] = work->second;
        }
        return row;
    }

    std::size_t index_of(std::uint64_t rank, const ScheduleOp& op) const {
        return static_cast<std::size_t>(&op - schedule_.ops[rank].data());
    }

    bool in_row(std::uint64_t rank, const ScheduleOp& op) const {
        return options_.rows && op.kind == OpKind::WeightGradient &&
               schedule_.chunk_of(rank, op).stage > 0;
    }

    /// An input gradient's own, or the one whose place a forward takes, if it has one.
    Row::Work* work_of(std::uint64_t rank, const ScheduleOp& op) {
        if (rows_.empty())
            return nullptr;
        const auto work = rows_[rank].work_of_op.find(index_of(rank, op));
        return work == rows_[rank].work_of_op.end() ? nullptr : &rows_[rank].works[work->second];
    }

    /// Weight gradients run until then, or until `last` has ended, at `share` of their speed.
    void advance_row(std::uint64_t rank, double until, double share,
                     const Row::Work* last = nullptr) {
        Row& row = rows_[rank];
        while (row.next < row.works.size() && (last == nullptr || last->end == kNever)) {
            Row::Work& work = row.works[row.next];
            const double start = std::max(row.time, work.ready);
            if (start >= until)
                break;
            OpTime& time = times_[rank][work.op];
            if (!std::exchange(work.begun, true))
                time.start = start;
            const double end = start + work.left / share;
            if (end > until) {
                work.left -= (until - start) * share;
                break;
            }
            row.time = time.end = work.end = end;
            ++row.next;
        }
        if (last == nullptr)
            row.time = std::max(row.time, until);
    }

    /// When an op of so much work that begins then has ended, with its rank's weight gradients
    /// beside it.
    double end_of(std::uint64_t rank, double start, double seconds) {
        if (rows_.empty())
            return start + seconds;
        advance_row(rank, start, 1);
        const Row& row = rows_[rank];
        double beside = 0;
        for (std::size_t i = row.next; i < row.works.size() && row.works[i].ready <= start; ++i)
            beside += row.works[i].left;
        const RowShares& shares = *options_.rows;
        const double together = std::min(beside / shares.weight_gradients, seconds / shares.others);
        advance_row(rank, start + together, shares.weight_gradients);
        return start + together + (seconds - together * shares.others);
    }

    void finish(std::uint64_t rank, const ScheduleOp& op, OpTime time) {
        const auto [stage, stream] = schedule_.chunk_of(rank, op);
        if (op.kind == OpKind::InputGradient)
            if (Row::Work* work = work_of(rank, op))
                work->ready = time.end;
        if (op.kind == OpKind::Forward && stage + 1 < schedule_.num_stages)
            activations_[slot(stage, op)] = arrival(rank, stream, stage + 1, time.end);
        if ((op.kind == OpKind::Backward || op.kind == OpKind::InputGradient) && stage > 0)
            gradients_[slot(stage, op)] = arrival(rank, stream, stage - 1, time.end);
        times_[rank][index_of(rank, op)] = time;
        free_[rank] = std::max(free_[rank], time.end);
    }

    /// When the rank is free for the op, what it waits for there among it.
    double free(std::uint64_t rank, const ScheduleOp& op) {
        Row::Work* before = op.kind == OpKind::Forward ? work_of(rank, op) : nullptr;
        if (before == nullptr)
            return free_[rank];
        advance_row(rank, kNever, 1, before);
        return std::max(free_[rank], before->end);
    }

    void run_one(std::uint64_t rank, const ScheduleOp& op) {
        const double start = std::max(free(rank, op), ready(rank, op));
        finish(rank, op, {start, end_of(rank, start, cost(rank, op))});
    }

    /// Runs the rank's next op, or pair; false if what it needs is not known yet.
    bool step(std::uint64_t rank) {
        const ScheduleOp& op = schedule_.ops[rank][next_[rank]];
        if (!op.with_next) {
            if (ready(rank, op) == kNever)
                return false;
            if (!in_row(rank, op))
                run_one(rank, op);
            ++next_[rank];
            return true;
        }
        const ScheduleOp& other = schedule_.ops[rank][next_[rank] + 1];
        const double first = ready(rank, op), second = ready(rank, other);
        if (first == kNever || second == kNever)
            return false;
        if (decouple_) {
            const bool swap = std::max(second, free_[rank]) < std::max(first, free_[rank]);
            run_one(rank, swap ? other : op);
            run_one(rank, swap ? op : other);
            if (swap)
                swapped_.emplace_back(rank, next_[rank] + 1);
        } else {
            const double start = std::max({free(rank, op), free(rank, other), first, second});
            const auto& pair = costs(schedule_.chunk_of(rank, op).stage).pair;
            const double end = end_of(
                rank, start, pair ? slowness(rank) * *pair : cost(rank, op) + cost(rank, other));
            finish(rank, op, {start, end});
            finish(rank, other, {start, end});
        }
        next_[rank] += 2;
        return true;
    }

    const Schedule& schedule_;
    const SimulationOptions& options_;
    bool decouple_;
    std::vector<std::pair<std::uint64_t, std::size_t>> swapped_;
    std::vector<std::vector<ChunkPlace>> places_;
    std::vector<double> activations_, gradients_; ///< [stage][micro-batch]: there at the next stage
    std::vector<std::size_t> next_;               ///< op of each rank
    std::vector<double> free_;                    ///< of each rank
    std::map<std::pair<std::uint64_t, std::uint64_t>, double> links_; ///< free from then on
    std::vector<std::vector<OpTime>> times_;
    std::vector<Row> rows_; ///< of each rank; empty: weight gradients run among the other ops
    std::uint64_t messages_ = 0;
};

void check(const Schedule& schedule, const SimulationOptions& options) {
    const auto refuse = [](const std::string& why) {
        throw Error(ErrorCode::InvalidArgument, "no simulation: " + why);
    };
    if (options.stages.size() != 1 && options.stages.size() != schedule.num_stages)
        refuse("costs of " + std::to_string(options.stages.size()) + " stages for " +
               std::to_string(schedule.num_stages));
    if (!options.slowness.empty() && options.slowness.size() != schedule.num_ranks())
        refuse("slowness of " + std::to_string(options.slowness.size()) + " ranks for " +
               std::to_string(schedule.num_ranks()));
    const auto good = [](double cost) { return std::isfinite(cost) && cost >= 0; };
    bool all = good(options.p2p_latency) && good(options.p2p_transfer);
    all = all && std::ranges::all_of(options.slowness, good);
    if (options.rows)
        for (const double share : {options.rows->weight_gradients, options.rows->others})
            if (!(share > 0 && share <= 1))
                refuse("each row of work must have a share of its speed above 0, at most 1");
    for (const StageCosts& of : options.stages)
        all = all && good(of.forward) && good(of.input_gradient) && good(of.weight_gradient) &&
              good(of.pair.value_or(0));
    if (!all)
        refuse("costs must be finite and not negative");
}

} // namespace

StageCosts StageCosts::scaled(double factor) const noexcept {
    StageCosts costs{factor * forward, factor * input_gradient, factor * weight_gradient, pair};
    if (costs.pair)
        *costs.pair *= factor;
    return costs;
}

double Timeline::bubble_share() const {
    return step_time > 0 ? *std::max_element(bubble.begin(), bubble.end()) / step_time : 0;
}

std::vector<std::vector<OpTime>> from_zero(std::vector<std::vector<OpTime>> ops) {
    double first = kNever;
    for (const auto& of_rank : ops)
        for (const OpTime& time : of_rank)
            first = std::min(first, time.start);
    for (auto& of_rank : ops)
        for (OpTime& time : of_rank)
            time = {time.start - first, time.end - first};
    return ops;
}

Timeline timeline_of(std::vector<std::vector<OpTime>> ops) {
    Timeline timeline;
    double first = kNever, last = 0;
    for (const auto& of_rank : ops)
        for (const OpTime& time : of_rank) {
            first = std::min(first, time.start);
            last = std::max(last, time.end);
        }
    timeline.step_time = first < last ? last - first : 0;
    for (std::vector<OpTime> of_rank : ops) {
        double busy = 0, begin = kNever, until = -kNever;
        std::ranges::sort(of_rank, {}, &OpTime::start); // measured ones may change places
        for (const OpTime& time : of_rank) {
            begin = std::min(begin, time.start);
            busy += std::max(0.0, time.end - std::max(until, time.start)); // a pair counts once
            until = std::max(until, time.end);
        }
        timeline.busy.push_back(busy);
        timeline.bubble.push_back(timeline.step_time - busy);
        timeline.inner_bubble.push_back(of_rank.empty() ? 0 : until - begin - busy);
    }
    timeline.ops = std::move(ops);
    return timeline;
}

Timeline simulate(const Schedule& schedule, const SimulationOptions& options) {
    verify(schedule); // so that no rank waits for ever
    check(schedule, options);
    return Simulation(schedule, options).run();
}

Schedule decouple_pairs(const Schedule& schedule, const SimulationOptions& options) {
    verify(schedule);
    check(schedule, options);
    Simulation simulation(schedule, options, true);
    simulation.run();
    Schedule single = schedule;
    for (const auto& [rank, op] : simulation.swapped())
        std::swap(single.ops[rank][op - 1], single.ops[rank][op]);
    for (auto& ops : single.ops)
        for (ScheduleOp& op : ops)
            op.with_next = false;
    return single;
}

} // namespace bellows
