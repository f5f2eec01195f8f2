// SPDX-License-Identifier: MIT
#include <bellows/base/error.hpp>
#include <bellows/pipeline/executor.hpp>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

namespace bellows {

namespace {

void require(bool holds, const std::string& rule) {
    if (!holds)
        throw Error(ErrorCode::InvalidArgument, "pipeline: " + rule);
}

/// Of what leaves a rank: activations, or gradients.
std::size_t way_of(OpKind kind) {
    return kind == OpKind::Forward ? 0 : 1;
}

} // namespace

PipelineExecutor::PipelineExecutor(Device& device, const Schedule& schedule, std::uint64_t rank,
                                   std::vector<int> world_ranks, std::vector<PipelineChunk*> chunks,
                                   PipelinePipes pipes, std::chrono::milliseconds limit)
    : device_(device),
      one_queue_(!device.distinct_queues(QueueRole::Compute, QueueRole::TransferOut)),
      schedule_(schedule), rank_(rank), world_ranks_(std::move(world_ranks)),
      chunks_(std::move(chunks)), pipes_(pipes), limit_(limit) {
    verify(schedule_);
    require(rank_ < schedule_.num_ranks() && world_ranks_.size() == schedule_.num_ranks(),
            "a schedule of " + std::to_string(schedule_.num_ranks()) + " ranks for rank " +
                std::to_string(rank_) + " of " + std::to_string(world_ranks_.size()));
    require(chunks_.size() == schedule_.chunks[rank_].size(),
            std::to_string(chunks_.size()) + " chunks where the schedule has " +
                std::to_string(schedule_.chunks[rank_].size()));
    require(schedule_.num_stages == 1 ||
                (pipes_.activations != nullptr && pipes_.gradients != nullptr),
            "stages need pipes between them");
    places_ = chunk_places(schedule_);
    for (std::uint64_t phase = 0; phase < chunks_.size(); ++phase) {
        slots_.push_back(schedule_.peak_in_flight(rank_, phase));
        input_gradients_.emplace_back(slots_.back());
    }
    for (const PipelineChunk* chunk : chunks_)
        require(chunk->num_nodes(OpKind::Forward) > 0 &&
                    (schedule_.forward_only || chunk->num_nodes(OpKind::InputGradient) > 0),
                "a chunk that does nothing");
}

void PipelineExecutor::interleave(std::uint32_t forward, std::uint32_t backward, PairOrder order) {
    require(forward < chunks_.size() && backward < chunks_.size(),
            "no pair of phases " + std::to_string(forward) + " and " + std::to_string(backward) +
                " where there are " + std::to_string(chunks_.size()));
    for (const OpKind part : {OpKind::Forward, OpKind::InputGradient, OpKind::WeightGradient}) {
        const std::size_t nodes =
            chunks_[part == OpKind::Forward ? forward : backward]->num_nodes(part);
        const auto given = static_cast<std::size_t>(std::ranges::count(order, part));
        require(given == nodes, "a pair's order names " + std::to_string(given) + " nodes of " +
                                    to_text({part, 0, 0}) + " where there are " +
                                    std::to_string(nodes));
    }
    require(std::ranges::count(order, OpKind::Backward) == 0,
            "a pair's order names a backward's halves, not the whole");
    orders_[{forward, backward}] = std::move(order);
}

void PipelineExecutor::fill(std::uint32_t backward, std::vector<BackwardNode> order) {
    require(backward < chunks_.size(), "no backward of phase " + std::to_string(backward) +
                                           " where there are " + std::to_string(chunks_.size()));
    for (const OpKind kind : {OpKind::InputGradient, OpKind::WeightGradient}) {
        std::vector<std::size_t> given;
        for (const BackwardNode& node : order)
            if (node.kind == kind)
                given.push_back(node.index);
        if (kind == OpKind::WeightGradient)
            std::ranges::sort(given);
        std::vector<std::size_t> expected(chunks_[backward]->num_nodes(kind));
        std::iota(expected.begin(), expected.end(), std::size_t{0});
        require(given == expected, "a backward's order does not have each of its " +
                                       std::to_string(expected.size()) + " nodes of " +
                                       to_text({kind, 0, 0}) + " once, input gradients ascending");
    }
    fills_[backward] = std::move(order);
}

int PipelineExecutor::rank_of(const ScheduleChunk& chunk, std::uint64_t stage) const {
    return world_ranks_[places_[chunk.stream][stage].rank];
}

/// Forwards alone do not keep what the next stage has not taken.
const std::uint32_t* PipelineExecutor::phase_here(const ScheduleChunk& chunk,
                                                  std::uint64_t stage) const {
    const ChunkPlace& place = places_[chunk.stream][stage];
    return place.rank == rank_ && !schedule_.forward_only ? &place.phase : nullptr;
}

std::uint64_t PipelineExecutor::slot_of(std::uint32_t phase, std::uint64_t micro_batch) const {
    const std::uint64_t stream = schedule_.chunks[rank_][phase].stream;
    return (micro_batch - schedule_.first_of_stream(stream)) % slots_[phase];
}

TimePoint PipelineExecutor::hand_over(const Part& part, std::uint32_t before) {
    const PipelineChunk &chunk = *chunks_[part.op.phase], &other = *chunks_[before];
    const std::uint64_t slot = slot_of(before, part.op.micro_batch);
    Copy& copy = copies_[{part.op.kind, part.op.phase, part.slot, slot}];
    if (!copy.recording) {
        const bool forward = part.op.kind == OpKind::Forward;
        const TensorView from = forward ? other.output(slot) : chunk.input_gradient(part.slot);
        const TensorView to = forward ? chunk.input(part.slot) : other.output_gradient(slot);
        copy.recording = std::make_unique<Recording>(
            device_, chunk.queue(), forward ? "activations handed over" : "gradients handed over");
        copy.recording->copy(from.buffer.sub(0, from.num_bytes()),
                             to.buffer.sub(0, to.num_bytes()));
    }
    copy.last.wait(limit_); // the device would, too, but not as long
    return copy.last = device_.submit(*copy.recording);
}

/// Posted ahead of the part's first node.
void PipelineExecutor::receive(const Part& part) {
    const ScheduleChunk& at = schedule_.chunk_of(rank_, part.op);
    const PipelineChunk& chunk = *chunks_[part.op.phase];
    const bool forward = part.op.kind == OpKind::Forward;
    if (part.op.kind == OpKind::WeightGradient ||
        (forward ? at.stage == 0 : at.stage + 1 == schedule_.num_stages))
        return;
    device_.trace_as("PP(" + to_name(part.op) + ")");
    const std::uint64_t other = forward ? at.stage - 1 : at.stage + 1;
    if (const std::uint32_t* before = phase_here(at, other)) {
        if (forward) // a gradient has been handed over by who made it
            hand_over(part, *before);
    } else if (forward) {
        pipes_.activations->recv(rank_of(at, other), chunk.input(part.slot));
    } else {
        pipes_.gradients->recv(rank_of(at, other), chunk.output_gradient(part.slot));
    }
}

bool PipelineExecutor::sends(const Part& part) const {
    const ScheduleChunk& at = schedule_.chunk_of(rank_, part.op);
    if (part.op.kind == OpKind::Forward)
        return at.stage + 1 < schedule_.num_stages;
    return part.op.kind == OpKind::InputGradient && at.stage > 0;
}

/// Where copies share a queue with what computes, they would stand behind all that could begin by
/// then: there ops begin in the schedule's order, and when what has left before has left.
std::vector<TimePoint> PipelineExecutor::waits_of(const Part& part) const {
    if (one_queue_)
        return {last_done_, last_sent_[0], last_sent_[1]};
    if (part.op.kind == OpKind::WeightGradient)
        return {input_gradients_[part.op.phase][part.slot]};
    return {last_computed_[way_of(part.op.kind)]};
}

/// Behind its last one.
TimePoint PipelineExecutor::send(const Part& part) {
    const ScheduleChunk& at = schedule_.chunk_of(rank_, part.op);
    const PipelineChunk& chunk = *chunks_[part.op.phase];
    device_.trace_as("PP(" + to_name(part.op) + ")");
    if (part.op.kind == OpKind::Forward) {
        if (phase_here(at, at.stage + 1) != nullptr) // whose forward takes it
            return part.computed;
        return pipes_.activations->send(rank_of(at, at.stage + 1), chunk.output(part.slot));
    }
    if (const std::uint32_t* before = phase_here(at, at.stage - 1))
        return hand_over(part, *before);
    return pipes_.gradients->send(rank_of(at, at.stage - 1), chunk.input_gradient(part.slot));
}

void PipelineExecutor::submit(Part& part, std::size_t node) {
    if (part.handed_in == 0)
        receive(part);
    device_.trace_as(to_name(part.op));
    const TimePoint done = chunks_[part.op.phase]->submit(part.op.kind, node, part.op.micro_batch,
                                                          part.slot, part.waits);
    if (chunks_[part.op.phase]->computes(part.op.kind, node))
        part.computed = done;
    if (++part.handed_in < part.count)
        return;
    last_done_ = done;
    if (!sends(part))
        return;
    last_computed_[way_of(part.op.kind)] = part.computed;
    last_sent_[way_of(part.op.kind)] = send(part);
    if (part.op.kind == OpKind::InputGradient)
        input_gradients_[part.op.phase][part.slot] = done;
}

void PipelineExecutor::submit_all(Part& part) {
    if (part.handed_in == 0)
        part.waits = waits_of(part);
    while (part.handed_in < part.count)
        submit_next(part);
}

void PipelineExecutor::submit_filled(Part& input, Part& weight,
                                     const std::vector<BackwardNode>& order) {
    input.waits = waits_of(input);
    for (const BackwardNode& node : order) {
        if (node.kind == OpKind::InputGradient) {
            submit(input, node.index);
            continue;
        }
        const bool fills = input.handed_in < input.count;
        weight.waits = fills ? input.waits : waits_of(weight);
        if (fills)
            weight.waits.push_back(input.computed);
        submit(weight, node.index);
    }
}

/// How many of the ops from `op` on are handed in together: a pair, or a backward's halves.
std::size_t PipelineExecutor::together(std::size_t op) const {
    const auto& ops = schedule_.ops[rank_];
    if (ops[op].with_next)
        return 2;
    const bool halves =
        ops[op].kind == OpKind::InputGradient && fills_.contains(ops[op].phase) &&
        op + 1 < ops.size() &&
        ops[op + 1] == ScheduleOp{OpKind::WeightGradient, ops[op].phase, ops[op].micro_batch};
    return halves ? 2 : 1;
}

PipelineExecutor::Part PipelineExecutor::part_of(const ScheduleOp& op, OpKind kind) const {
    return {{kind, op.phase, op.micro_batch},
            slot_of(op.phase, op.micro_batch),
            0,
            chunks_[op.phase]->num_nodes(kind)};
}

std::vector<PipelineExecutor::Part>
PipelineExecutor::parts_of(std::span<const ScheduleOp> ops) const {
    std::vector<Part> parts;
    for (const ScheduleOp& op : ops) {
        if (op.kind != OpKind::Backward) {
            parts.push_back(part_of(op, op.kind));
            continue;
        }
        parts.push_back(part_of(op, OpKind::InputGradient));
        parts.push_back(part_of(op, OpKind::WeightGradient));
    }
    return parts;
}

void PipelineExecutor::run() {
    const TracedAs nothing(device_, ""); // each part says its own
    const std::span<const ScheduleOp> ops = schedule_.ops[rank_];
    for (std::size_t i = 0; i < ops.size();) {
        const std::size_t count = together(i);
        std::vector<Part> parts = parts_of(ops.subspan(i, count));
        const Gathering gathering(device_);
        const auto filled = fills_.find(ops[i].phase);
        if (ops[i].with_next) {
            const auto order = orders_.find({ops[i].phase, ops[i + 1].phase});
            for (Part& part : parts)
                part.waits = one_queue_ ? waits_of(part) : std::vector<TimePoint>();
            if (order != orders_.end())
                for (const OpKind kind : order->second)
                    submit_next(*std::ranges::find(parts, kind,
                                                   [](const Part& part) { return part.op.kind; }));
        } else if (parts.size() == 2 && filled != fills_.end()) {
            submit_filled(parts[0], parts[1], filled->second);
        }
        for (Part& part : parts)
            submit_all(part);
        i += count;
    }
}

} // namespace bellows
