// SPDX-License-Identifier: MIT
#include "training_chunk.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/ops.hpp>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace bellows {

namespace {

/// What is no part of an op, for the trace.
template <class Call>
void beside(Device& device, Call call) {
    const TracedAs nothing(device, "");
    call();
}

Lane add_lane(HostThread& thread, const char* what, std::uint64_t stage) {
    return thread.add_lane(std::string(what) + " of stage " + std::to_string(stage));
}

} // namespace

TrainingChunk::TrainingChunk(RunningStep& step, HostThread& thread, Stage& stage,
                             ShardedOptimizer& optimizer, const Desc& desc)
    : step_(step), stage_(stage), optimizer_(optimizer), desc_(desc),
      data_(add_lane(thread, "data", desc.stage)), losses_(add_lane(thread, "losses", desc.stage)) {
}

TimePoint TrainingChunk::submit(OpKind op, std::size_t node, std::uint64_t micro_batch,
                                std::uint64_t slot, std::span<const TimePoint> waits) {
    const auto& of_op = nodes(op, slot);
    const bool forward = op == OpKind::Forward;
    if (forward && node == 0 && (stage_.first() || stage_.last()))
        beside(step_.device, [&] { post_data(micro_batch, slot); });
    if (step_.held_out == nullptr)
        clear_gradients(op, node, micro_batch);
    TimePoint done = run(*of_op[node], waits);
    if (computes(op, node))
        computed_ = done;
    if (forward && node + 1 == of_op.size() && stage_.last())
        beside(step_.device, [&] { post_loss(micro_batch, slot); });
    // After the last micro-batch's nothing is added to a gradient but other ranks'.
    if (op == OpKind::WeightGradient && micro_batch == desc_.last_micro_batch)
        beside(step_.device,
               [&] { optimizer_.gradient_handed_in(desc_.phase, node, of_op.size()); });
    return done;
}

/// A recording is never pending twice: the device would wait for its last run too, but not as long.
TimePoint TrainingChunk::run(const Node& node, std::span<const TimePoint> waits) {
    TimePoint& last = last_runs_[&node];
    last.wait(step_.limit);
    return last = node.submit(waits);
}

/// Ahead of a node: a piece of them in the step's first forward, what is left ahead of all else.
void TrainingChunk::clear_gradients(OpKind op, std::size_t node, std::uint64_t micro_batch) {
    if (op == OpKind::Forward && desc_.opening == micro_batch)
        step_.clearing->before(node, computed_);
    else
        step_.clearing->finish();
}

void TrainingChunk::post_data(std::uint64_t micro_batch, std::uint64_t slot) {
    const std::uint64_t seq = step_.seq, sequences = stage_.tokens() / seq;
    const std::uint64_t first = (step_.first_micro_batch + micro_batch) * sequences;
    std::vector<std::uint32_t> tokens(stage_.tokens()), targets(stage_.tokens()), line(seq + 1);
    for (std::uint64_t i = 0; i < sequences; ++i) {
        const std::uint64_t all = step_.held_out != nullptr ? step_.held_out->num_sequences : 0;
        const bool fills_up = step_.held_out != nullptr && first + i >= all;
        (*step_.source)(step_.index, fills_up ? (first + i) % all : first + i, line);
        std::copy_n(line.begin(), seq, tokens.begin() + static_cast<std::ptrdiff_t>(i * seq));
        if (fills_up)
            std::ranges::fill(line, ops::kIgnoreTarget);
        std::copy_n(line.begin() + 1, seq, targets.begin() + static_cast<std::ptrdiff_t>(i * seq));
    }
    Buffer& token_buffer = stage_.token_buffer(slot);
    Buffer& target_buffer = stage_.target_buffer(slot);
    LaneJob job;
    job.name = "data of micro-batch " + std::to_string(micro_batch);
    job.accesses = {{token_buffer.view(), Access::Write}, {target_buffer.view(), Access::Write}};
    job.step = [&token_buffer, &target_buffer, tokens = std::move(tokens),
                targets = std::move(targets)](LaneContext&) {
        std::memcpy(token_buffer.mapped(), tokens.data(), tokens.size() * 4);
        std::memcpy(target_buffer.mapped(), targets.data(), targets.size() * 4);
        return Progress::Done;
    };
    data_.post(std::move(job));
}

void TrainingChunk::post_loss(std::uint64_t micro_batch, std::uint64_t slot) {
    Buffer& buffer = stage_.loss_buffer(slot);
    LaneJob job;
    job.name = "loss of micro-batch " + std::to_string(micro_batch);
    job.accesses = {{buffer.view(), Access::Read}};
    job.step = [&totals = step_.totals, held_out = step_.held_out, &buffer,
                number = step_.first_micro_batch + micro_batch](LaneContext&) {
        const auto pair = buffer.mapped_as<const float>();
        const double loss = static_cast<double>(pair[0]) + static_cast<double>(pair[1]);
        if (held_out != nullptr)
            held_out->by_micro_batch[number] = loss;
        else
            totals.note_loss(number, loss);
        return Progress::Done;
    };
    step_.last_loss = losses_.post(std::move(job));
}

} // namespace bellows
