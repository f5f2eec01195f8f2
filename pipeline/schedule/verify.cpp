// SPDX-License-Identifier: MIT
// The verifier. Sizes and ranges come first: all that follows indexes with them.

#include <bellows/base/error.hpp>
#include <bellows/schedule/schedule.hpp>

#include <map>
#include <optional>
#include <utility>

namespace bellows {

namespace {

[[noreturn]] void broken(const std::string& rule) {
    throw Error(ErrorCode::InvalidArgument, "no valid schedule: " + rule);
}

[[noreturn]] void broken(std::uint64_t rank, const ScheduleOp& op, const std::string& rule) {
    broken("rank " + std::to_string(rank) + ", " + to_name(op) + ": " + rule);
}

/// That each stage stands on one rank in each stream.
void check_chunks(const Schedule& schedule) {
    if (schedule.num_stages == 0 || schedule.num_streams == 0 || schedule.num_micro_batches == 0)
        broken("it needs at least one stage, one stream and one micro-batch");
    if (schedule.num_micro_batches % schedule.num_streams != 0)
        broken(std::to_string(schedule.num_micro_batches) +
               " micro-batches cannot be shared out over " + std::to_string(schedule.num_streams) +
               " streams");
    if (schedule.chunks.size() != schedule.num_ranks())
        broken("it has chunks for " + std::to_string(schedule.chunks.size()) +
               " ranks and ops for " + std::to_string(schedule.num_ranks()));
    std::uint64_t count = 0;
    for (const auto& chunks : schedule.chunks)
        count += chunks.size();
    if (count % schedule.num_streams != 0 || count / schedule.num_streams != schedule.num_stages)
        broken("its ranks have " + std::to_string(count) + " chunks, not one of each of " +
               std::to_string(schedule.num_stages) + " stages in each of " +
               std::to_string(schedule.num_streams) + " streams");
    std::vector<bool> found(count, false);
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank)
        for (const ScheduleChunk& chunk : schedule.chunks[rank]) {
            const std::string name = "rank " + std::to_string(rank) + ": stage " +
                                     std::to_string(chunk.stage) + " of stream " +
                                     std::to_string(chunk.stream);
            if (chunk.stage >= schedule.num_stages || chunk.stream >= schedule.num_streams)
                broken(name + " does not exist");
            const std::uint64_t at = chunk.stream * schedule.num_stages + chunk.stage;
            if (found[at])
                broken(name + " stands on two chunks");
            found[at] = true;
        }
}

void check_ops(const Schedule& schedule) {
    const std::uint64_t of_stream = schedule.num_micro_batches / schedule.num_streams;
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank) {
        const std::uint64_t chunks = schedule.chunks[rank].size(), ops = schedule.ops[rank].size();
        const std::uint64_t least = schedule.forward_only ? 1 : 2;
        if (chunks > 0 && of_stream > ops / (least * chunks))
            broken("rank " + std::to_string(rank) + " has " + std::to_string(ops) +
                   " ops, not at least " + (least == 1 ? "one" : "two") + " for each of " +
                   std::to_string(of_stream) + " micro-batches of each chunk");
        for (const ScheduleOp& op : schedule.ops[rank]) {
            if (op.kind > OpKind::WeightGradient)
                broken(rank, op,
                       "no kind of op has the number " +
                           std::to_string(static_cast<unsigned>(op.kind)));
            if (op.phase >= schedule.chunks[rank].size())
                broken(rank, op, "there is no such phase");
            if (schedule.forward_only && op.kind != OpKind::Forward)
                broken(rank, op, "nothing goes back in a schedule of forwards alone");
            const std::uint64_t first =
                schedule.first_of_stream(schedule.chunk_of(rank, op).stream);
            if (op.micro_batch < first || op.micro_batch - first >= of_stream)
                broken(rank, op,
                       "there are micro-batches " + std::to_string(first) + " to " +
                           std::to_string(first + of_stream - 1));
        }
    }
}

void check_pairs(const Schedule& schedule) {
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank) {
        const auto& ops = schedule.ops[rank];
        for (std::size_t i = 0; i < ops.size(); ++i)
            if (ops[i].with_next && (ops[i].kind != OpKind::Forward || i + 1 == ops.size() ||
                                     ops[i + 1].kind != OpKind::Backward || ops[i + 1].with_next))
                broken(rank, ops[i], "a pair is a forward and, next, a backward");
    }
}

/// What has been done of a chunk's micro-batch.
struct Done {
    bool forward = false, input_gradient = false, weight_gradient = false;
};

/// Runs all ranks as far as they can; what is left waits for ever.
class Replay {
public:
    explicit Replay(const Schedule& schedule)
        : schedule_(schedule), done_(schedule.num_stages * schedule.num_micro_batches),
          next_(schedule.num_ranks(), 0) {}

    void run() {
        for (bool progress = true; progress;) {
            progress = false;
            for (std::uint64_t rank = 0; rank < schedule_.num_ranks(); ++rank)
                while (step(rank))
                    progress = true;
        }
        for (std::uint64_t rank = 0; rank < schedule_.num_ranks(); ++rank)
            if (next_[rank] < schedule_.ops[rank].size())
                broken(rank, schedule_.ops[rank][next_[rank]],
                       "waits for an op that never runs before it");
        for (std::uint64_t rank = 0; rank < schedule_.num_ranks(); ++rank)
            for (std::uint32_t phase = 0; phase < schedule_.chunks[rank].size(); ++phase)
                check_all(rank, phase);
    }

private:
    Done& done(std::uint64_t stage, std::uint64_t micro_batch) {
        return done_[stage * schedule_.num_micro_batches + micro_batch];
    }

    bool can_run(std::uint64_t rank, const ScheduleOp& op) {
        const std::uint64_t stage = schedule_.chunk_of(rank, op).stage;
        const Done& here = done(stage, op.micro_batch);
        switch (op.kind) {
        case OpKind::Forward:
            return stage == 0 || done(stage - 1, op.micro_batch).forward;
        case OpKind::Backward:
        case OpKind::InputGradient:
            return here.forward && (stage + 1 == schedule_.num_stages ||
                                    done(stage + 1, op.micro_batch).input_gradient);
        case OpKind::WeightGradient:
            return here.input_gradient;
        }
        return false;
    }

    void run_one(std::uint64_t rank, const ScheduleOp& op) {
        Done& here = done(schedule_.chunk_of(rank, op).stage, op.micro_batch);
        const auto once = [&](bool& what) {
            if (std::exchange(what, true))
                broken(rank, op, "runs twice");
        };
        if (op.kind == OpKind::Forward)
            once(here.forward);
        if (op.kind == OpKind::Backward || op.kind == OpKind::InputGradient)
            once(here.input_gradient);
        if (op.kind == OpKind::Backward || op.kind == OpKind::WeightGradient)
            once(here.weight_gradient);
    }

    bool step(std::uint64_t rank) {
        const auto& ops = schedule_.ops[rank];
        std::size_t& next = next_[rank];
        const std::size_t count = next < ops.size() && ops[next].with_next ? 2 : 1;
        if (next + count > ops.size())
            return false;
        for (std::size_t i = next; i < next + count; ++i)
            if (!can_run(rank, ops[i]))
                return false;
        for (std::size_t i = 0; i < count; ++i)
            run_one(rank, ops[next++]);
        return true;
    }

    void check_all(std::uint64_t rank, std::uint32_t phase) {
        const auto [stage, stream] = schedule_.chunks[rank][phase];
        const std::uint64_t first = schedule_.first_of_stream(stream);
        const std::uint64_t end = first + schedule_.num_micro_batches / schedule_.num_streams;
        for (std::uint64_t m = first; m < end; ++m) {
            const Done& here = done(stage, m);
            for (const auto& [kind, ran] : {std::pair(OpKind::Forward, here.forward),
                                            {OpKind::InputGradient, here.input_gradient},
                                            {OpKind::WeightGradient, here.weight_gradient}})
                if (!ran && (kind == OpKind::Forward || !schedule_.forward_only))
                    broken(rank, {kind, phase, m}, "never runs");
        }
    }

    const Schedule& schedule_;
    std::vector<Done> done_; ///< [stage][micro-batch]
    std::vector<std::size_t> next_;
};

/// A message between ranks: what an op makes for the stage next to it.
struct Message {
    std::uint64_t rank = 0; ///< where the op runs
    ScheduleOp op;
    std::uint64_t to_stage = 0;
};
/// By (from, to): in the order in which they are put in, and in which they are taken.
struct Edge {
    std::vector<Message> sent, taken;
};

/// The k-th message that a rank takes from another is the k-th that was put in there.
void check_edges(const Schedule& schedule, bool forwards) {
    const auto places = chunk_places(schedule);
    std::map<std::pair<std::uint64_t, std::uint64_t>, Edge> edges;
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank)
        for (const ScheduleOp& op : schedule.ops[rank]) {
            if (op.kind == OpKind::WeightGradient || (op.kind == OpKind::Forward) != forwards)
                continue;
            const auto [stage, stream] = schedule.chunk_of(rank, op);
            const bool first = stage == 0, last = stage + 1 == schedule.num_stages;
            const std::uint64_t before = forwards ? stage - 1 : stage + 1,
                                behind = forwards ? stage + 1 : stage - 1;
            if (forwards ? !first : !last)
                edges[{places[stream][before].rank, rank}].taken.push_back({rank, op, stage});
            if (forwards ? !last : !first)
                edges[{rank, places[stream][behind].rank}].sent.push_back({rank, op, behind});
        }
    for (const auto& [ends, edge] : edges)
        for (std::size_t k = 0; k < edge.taken.size(); ++k) {
            const Message &sent = edge.sent[k], &taken = edge.taken[k];
            if (sent.op.micro_batch != taken.op.micro_batch || sent.to_stage != taken.to_stage)
                broken(taken.rank, taken.op,
                       "takes message " + std::to_string(k) + " of rank " +
                           std::to_string(sent.rank) + ", which is that of " + to_name(sent.op));
        }
}

void check_order_of_sums(const Schedule& schedule, std::uint64_t rank) {
    std::vector<std::uint64_t> next;
    for (const ScheduleChunk& chunk : schedule.chunks[rank])
        next.push_back(schedule.first_of_stream(chunk.stream));
    for (const ScheduleOp& op : schedule.ops[rank])
        if ((op.kind == OpKind::Backward || op.kind == OpKind::WeightGradient) &&
            op.micro_batch != next[op.phase]++)
            broken(rank, op, "a chunk's weight gradients must be summed in ascending order");
}

/// A chunk's activations live in slot m % peak_in_flight from forward to weight gradient, m
/// counting the stream's micro-batches.
void check_slots(const Schedule& schedule, std::uint64_t rank, std::uint32_t phase) {
    const std::uint64_t slots = schedule.peak_in_flight(rank, phase);
    const std::uint64_t first = schedule.first_of_stream(schedule.chunks[rank][phase].stream);
    std::vector<std::optional<std::uint64_t>> held(slots);
    for (const ScheduleOp& op : schedule.ops[rank]) {
        if (op.phase != phase)
            continue;
        const std::uint64_t at = (op.micro_batch - first) % slots;
        if (op.kind == OpKind::Forward && held[at])
            broken(rank, op,
                   "needs slot " + std::to_string(at) + " of " + std::to_string(slots) +
                       ", which still holds micro-batch " + std::to_string(*held[at]));
        if (op.kind == OpKind::Forward)
            held[at] = op.micro_batch;
        else if (op.kind != OpKind::InputGradient)
            held[at].reset();
    }
}

} // namespace

void verify(const Schedule& schedule) {
    check_chunks(schedule);
    check_ops(schedule);
    check_pairs(schedule);
    Replay(schedule).run();
    check_edges(schedule, true);
    check_edges(schedule, false);
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank) {
        check_order_of_sums(schedule, rank);
        for (std::uint32_t phase = 0;
             phase < schedule.chunks[rank].size() && !schedule.forward_only; ++phase)
            check_slots(schedule, rank, phase);
    }
}

} // namespace bellows
