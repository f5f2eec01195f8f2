// SPDX-License-Identifier: MIT
#include <bellows/engine/error.hpp>
#include <bellows/pipeline/schedule.hpp>

#include <algorithm>

namespace bellows {

namespace {

std::string name_of(const ScheduleOp& op) {
    static constexpr char kLetters[] = {'F', 'B', 'W'};
    return kLetters[static_cast<int>(op.kind)] + std::to_string(op.micro_batch);
}

[[noreturn]] void broken(std::uint64_t stage, const ScheduleOp& op, const std::string& rule) {
    throw Error(ErrorCode::Internal,
                "stage " + std::to_string(stage) + ", " + name_of(op) + ": " + rule);
}

/// Which ops have run, while stages are replayed against each other.
struct Replay {
    explicit Replay(const Schedule& schedule)
        : done(schedule.num_stages, std::vector<std::vector<bool>>(
                                        3, std::vector<bool>(schedule.num_micro_batches, false))) {}

    bool ran(std::uint64_t stage, OpKind kind, std::uint64_t micro_batch) const {
        return done[stage][static_cast<std::size_t>(kind)][micro_batch];
    }
    std::vector<std::vector<std::vector<bool>>> done; ///< [stage][kind][micro-batch]
};

/// Whether what the op needs has run: on its own stage and on its neighbour.
bool can_run(const Schedule& schedule, const Replay& replay, std::uint64_t stage,
             const ScheduleOp& op) {
    switch (op.kind) {
    case OpKind::Forward:
        return stage == 0 || replay.ran(stage - 1, OpKind::Forward, op.micro_batch);
    case OpKind::InputGradient:
        return replay.ran(stage, OpKind::Forward, op.micro_batch) &&
               (stage + 1 == schedule.num_stages ||
                replay.ran(stage + 1, OpKind::InputGradient, op.micro_batch));
    case OpKind::WeightGradient:
        return replay.ran(stage, OpKind::InputGradient, op.micro_batch);
    }
    return false;
}

void check_order_of_sums(const Schedule& schedule, std::uint64_t stage) {
    std::uint64_t next = 0;
    for (const ScheduleOp& op : schedule.stages[stage])
        if (op.kind == OpKind::WeightGradient && op.micro_batch != next++)
            broken(stage, op, "weight gradients must be summed in ascending order");
}

} // namespace

std::uint64_t Schedule::peak_in_flight(std::uint64_t stage) const {
    std::uint64_t now = 0, peak = 0;
    for (const ScheduleOp& op : stages.at(stage)) {
        now += op.kind == OpKind::Forward ? 1 : 0;
        peak = std::max(peak, now);
        now -= op.kind == OpKind::WeightGradient ? 1 : 0;
    }
    return peak;
}

Schedule one_f_one_b(std::uint64_t num_stages, std::uint64_t num_micro_batches) {
    if (num_stages == 0 || num_micro_batches == 0)
        throw Error(ErrorCode::InvalidArgument,
                    "a schedule needs at least one stage and one micro-batch");
    Schedule schedule{num_stages, num_micro_batches, {}};
    for (std::uint64_t stage = 0; stage < num_stages; ++stage) {
        std::vector<ScheduleOp> ops;
        const std::uint64_t warm_up = std::min(num_micro_batches, num_stages - 1 - stage);
        for (std::uint64_t m = 0; m < warm_up; ++m)
            ops.push_back({OpKind::Forward, m});
        for (std::uint64_t m = 0; m < num_micro_batches; ++m) {
            if (warm_up + m < num_micro_batches)
                ops.push_back({OpKind::Forward, warm_up + m});
            ops.push_back({OpKind::InputGradient, m});
            ops.push_back({OpKind::WeightGradient, m});
        }
        schedule.stages.push_back(std::move(ops));
    }
    return schedule;
}

void verify(const Schedule& schedule) {
    Replay replay(schedule);
    std::vector<std::size_t> next(schedule.num_stages, 0);
    for (bool progress = true; progress;) {
        progress = false;
        for (std::uint64_t stage = 0; stage < schedule.num_stages; ++stage) {
            const auto& ops = schedule.stages[stage];
            while (next[stage] < ops.size() && can_run(schedule, replay, stage, ops[next[stage]])) {
                const ScheduleOp& op = ops[next[stage]++];
                auto& done = replay.done[stage][static_cast<std::size_t>(op.kind)];
                if (done.at(op.micro_batch))
                    broken(stage, op, "runs twice");
                done[op.micro_batch] = true;
                progress = true;
            }
        }
    }
    for (std::uint64_t stage = 0; stage < schedule.num_stages; ++stage) {
        const auto& ops = schedule.stages[stage];
        if (next[stage] < ops.size())
            broken(stage, ops[next[stage]], "waits for an op that never runs before it");
        if (ops.size() != 3 * schedule.num_micro_batches)
            throw Error(ErrorCode::Internal, "stage " + std::to_string(stage) + " has " +
                                                 std::to_string(ops.size()) + " ops, not " +
                                                 std::to_string(3 * schedule.num_micro_batches));
        check_order_of_sums(schedule, stage);
    }
}

std::string to_text(const Schedule& schedule) {
    std::string text;
    for (const auto& ops : schedule.stages) {
        for (std::size_t i = 0; i < ops.size(); ++i)
            text += (i == 0 ? "" : " ") + name_of(ops[i]);
        text += '\n';
    }
    return text;
}

} // namespace bellows
