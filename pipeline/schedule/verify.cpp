// SPDX-License-Identifier: MIT
// The verifier. Sizes and ranges come first: all that follows indexes with them.

#include <bellows/engine/error.hpp>
#include <bellows/pipeline/schedule.hpp>

#include <array>
#include <optional>

namespace bellows {

namespace {

[[noreturn]] void broken(const std::string& rule) {
    throw Error(ErrorCode::InvalidArgument, "no valid schedule: " + rule);
}

[[noreturn]] void broken(std::uint64_t stage, const ScheduleOp& op, const std::string& rule) {
    broken("stage " + std::to_string(stage) + ", " + to_text(op) + ": " + rule);
}

void check_ranges(const Schedule& schedule) {
    const std::uint64_t micro_batches = schedule.num_micro_batches;
    if (schedule.num_stages == 0 || micro_batches == 0)
        broken("it needs at least one stage and one micro-batch");
    if (schedule.stages.size() != schedule.num_stages)
        broken("it has ops for " + std::to_string(schedule.stages.size()) + " stages, not for " +
               std::to_string(schedule.num_stages));
    for (std::uint64_t stage = 0; stage < schedule.num_stages; ++stage) {
        const auto& ops = schedule.stages[stage];
        if (ops.size() % 3 != 0 || ops.size() / 3 != micro_batches)
            broken("stage " + std::to_string(stage) + " has " + std::to_string(ops.size()) +
                   " ops, not three for each of " + std::to_string(micro_batches) +
                   " micro-batches");
        for (const ScheduleOp& op : ops) {
            if (op.kind > OpKind::WeightGradient)
                broken(stage, op,
                       "no kind of op has the number " +
                           std::to_string(static_cast<unsigned>(op.kind)));
            if (op.micro_batch >= micro_batches)
                broken(stage, op,
                       "there are micro-batches 0 to " + std::to_string(micro_batches - 1));
        }
    }
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

/// Runs all stages as far as they can; what is left waits for ever.
void check_dependencies(const Schedule& schedule) {
    Replay replay(schedule);
    std::vector<std::size_t> next(schedule.num_stages, 0);
    for (bool progress = true; progress;) {
        progress = false;
        for (std::uint64_t stage = 0; stage < schedule.num_stages; ++stage) {
            const auto& ops = schedule.stages[stage];
            while (next[stage] < ops.size() && can_run(schedule, replay, stage, ops[next[stage]])) {
                const ScheduleOp& op = ops[next[stage]++];
                auto& done = replay.done[stage][static_cast<std::size_t>(op.kind)];
                if (done[op.micro_batch])
                    broken(stage, op, "runs twice");
                done[op.micro_batch] = true;
                progress = true;
            }
        }
    }
    for (std::uint64_t stage = 0; stage < schedule.num_stages; ++stage)
        if (next[stage] < schedule.stages[stage].size())
            broken(stage, schedule.stages[stage][next[stage]],
                   "waits for an op that never runs before it");
}

/// What a stage sends with ops of `kind`, or receives before them, in order.
std::vector<ScheduleOp> ops_of(const Schedule& schedule, std::uint64_t stage, OpKind kind) {
    std::vector<ScheduleOp> ops;
    for (const ScheduleOp& op : schedule.stages[stage])
        if (op.kind == kind)
            ops.push_back(op);
    return ops;
}

/// The k-th message that a stage takes from an edge is the k-th that its neighbour put in.
void check_edge(const Schedule& schedule, std::uint64_t from, std::uint64_t to, OpKind kind) {
    const auto sent = ops_of(schedule, from, kind), taken = ops_of(schedule, to, kind);
    for (std::size_t k = 0; k < taken.size(); ++k)
        if (!(sent[k] == taken[k]))
            broken(to, taken[k],
                   "takes message " + std::to_string(k) + " of stage " + std::to_string(from) +
                       ", which is that of " + to_text(sent[k]));
}

void check_order_of_sums(const Schedule& schedule, std::uint64_t stage) {
    std::uint64_t next = 0;
    for (const ScheduleOp& op : schedule.stages[stage])
        if (op.kind == OpKind::WeightGradient && op.micro_batch != next++)
            broken(stage, op, "weight gradients must be summed in ascending order");
}

/// Activations live in slot micro_batch % peak_in_flight from forward to weight gradient.
void check_slots(const Schedule& schedule, std::uint64_t stage) {
    const std::uint64_t slots = schedule.peak_in_flight(stage);
    std::vector<std::optional<std::uint64_t>> held(slots);
    for (const ScheduleOp& op : schedule.stages[stage]) {
        auto& slot = held[op.micro_batch % slots];
        if (op.kind == OpKind::Forward && slot)
            broken(stage, op,
                   "needs slot " + std::to_string(op.micro_batch % slots) + " of " +
                       std::to_string(slots) + ", which still holds micro-batch " +
                       std::to_string(*slot));
        if (op.kind == OpKind::Forward)
            slot = op.micro_batch;
        else if (op.kind == OpKind::WeightGradient)
            slot.reset();
    }
}

} // namespace

void verify(const Schedule& schedule) {
    check_ranges(schedule);
    check_dependencies(schedule);
    for (std::uint64_t stage = 0; stage < schedule.num_stages; ++stage) {
        if (stage + 1 < schedule.num_stages) {
            check_edge(schedule, stage, stage + 1, OpKind::Forward);
            check_edge(schedule, stage + 1, stage, OpKind::InputGradient);
        }
        check_order_of_sums(schedule, stage);
        check_slots(schedule, stage);
    }
}

} // namespace bellows
