// SPDX-License-Identifier: MIT
#include "training_chunk.hpp"

#include "documents.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/ops.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
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
    if (forward && node == 0 && (stage_.first() || stage_.last() || stage_.masks_documents()))
        beside(step_.device, [&] { post_data(micro_batch, slot); });
    if (Buffer* spared = stage_.spared_buffer(slot); forward && node == 0 && spared != nullptr)
        beside(step_.device, [&] { post_spared(micro_batch, *spared); });
    if (step_.held_out == nullptr)
        clear_gradients(op, node, micro_batch);
    TimePoint done = run(*of_op[node], waits);
    if (computes(op, node))
        computed_ = done;
    if (forward && node + 1 == of_op.size() && stage_.last())
        beside(step_.device, [&] { post_loss(micro_batch, slot); });
    // After the last micro-batch's nothing is added to a gradient but other ranks'.
    if (op == OpKind::WeightGradient && micro_batch == ends_.last_micro_batch)
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
    if (op == OpKind::Forward && ends_.opening == micro_batch)
        step_.clearing->before(node, computed_);
    else
        step_.clearing->finish();
}

void TrainingChunk::post_data(std::uint64_t micro_batch, std::uint64_t slot) {
    const std::uint64_t seq = step_.seq;
    const std::uint64_t first = (step_.first_micro_batch + micro_batch) * sequences();
    const std::uint64_t all = step_.held_out != nullptr ? step_.held_out->num_sequences
                                                        : std::numeric_limits<std::uint64_t>::max();
    TokenLines lines{.tokens = std::vector<std::uint32_t>(sequences() * (seq + 1)),
                     .seq = seq,
                     .with_targets = all - std::min(all, first),
                     .end_of_document = step_.end_of_document};
    for (std::uint64_t i = 0; i < sequences(); ++i)
        (*step_.source)(step_.index, (first + i) % all,
                        std::span(lines.tokens).subspan(i * (seq + 1), seq + 1));
    LaneJob job;
    job.name = "data of micro-batch " + std::to_string(micro_batch);
    write_data(job, slot, lines);
    data_.post(std::move(job));
}

void TrainingChunk::write_data(LaneJob& job, std::uint64_t slot, const TokenLines& lines) {
    std::vector<std::pair<Buffer*, std::vector<std::uint32_t>>> written;
    const auto write = [&](Buffer& buffer, std::vector<std::uint32_t> values) {
        job.accesses.push_back({buffer.view(), Access::Write});
        written.emplace_back(&buffer, std::move(values));
    };
    if (stage_.masks_documents()) {
        auto documents =
            documents_of(tokens_ahead(lines, 0), step_.seq, step_.end_of_document.value());
        if (stage_.first() && step_.held_out == nullptr)
            step_.totals.note_visible_keys(visible_keys(documents));
        write(stage_.documents_buffer(slot), std::move(documents));
    }
    if (stage_.first() || stage_.last()) {
        write(stage_.token_buffer(slot), tokens_ahead(lines, 0));
        write(stage_.target_buffer(slot), targets_of_model(lines));
    }
    const std::span<ModuleBuffers> modules = stage_.module_buffers(slot);
    for (std::size_t k = 0; k < modules.size(); ++k) {
        write(modules[k].tokens, tokens_ahead(lines, k + 1));
        write(modules[k].targets, targets_of_module(lines, k));
        // Held-out losses, which have no gradient, need none.
        const double predicted = k < step_.predicted.size() ? step_.predicted[k] : 0;
        const auto factor = static_cast<float>(
            predicted > 0 ? step_.mtp_weight / (static_cast<double>(modules.size()) * predicted)
                          : 0);
        write(modules[k].factor, {std::bit_cast<std::uint32_t>(factor)});
    }
    job.step = [written = std::move(written)](LaneContext&) {
        for (const auto& [buffer, values] : written)
            std::memcpy(buffer->mapped(), values.data(), values.size() * 4);
        return Progress::Done;
    };
}

/// Without a gradient nothing is dropped.
void TrainingChunk::post_spared(std::uint64_t micro_batch, Buffer& buffer) {
    const std::uint64_t first =
        step_.index * step_.batch + (step_.first_micro_batch + micro_batch) * sequences();
    std::vector<std::uint32_t> spared(sequences());
    for (std::uint64_t i = 0; i < sequences(); ++i)
        spared[i] = step_.held_out != nullptr || stage_.model().spares(first + i) ? 1 : 0;
    LaneJob job;
    job.name = "spared sequences of micro-batch " + std::to_string(micro_batch);
    job.accesses = {{buffer.view(), Access::Write}};
    job.step = [&buffer, spared = std::move(spared)](LaneContext&) {
        std::memcpy(buffer.mapped(), spared.data(), spared.size() * 4);
        return Progress::Done;
    };
    data_.post(std::move(job));
}

void TrainingChunk::post_loss(std::uint64_t micro_batch, std::uint64_t slot) {
    std::vector<const Buffer*> losses = {&stage_.loss_buffer(slot)};
    for (const ModuleBuffers& module : stage_.module_buffers(slot))
        losses.push_back(&module.loss);
    LaneJob job;
    job.name = "loss of micro-batch " + std::to_string(micro_batch);
    for (const Buffer* buffer : losses)
        job.accesses.push_back({buffer->view(), Access::Read});
    job.step = [&totals = step_.totals, held_out = step_.held_out, losses = std::move(losses),
                number = step_.first_micro_batch + micro_batch](LaneContext&) {
        std::vector<double> sums;
        for (const Buffer* buffer : losses) {
            const auto pair = buffer->mapped_as<const float>();
            sums.push_back(static_cast<double>(pair[0]) + static_cast<double>(pair[1]));
        }
        const double loss = sums.front();
        sums.erase(sums.begin());
        if (held_out != nullptr)
            held_out->by_micro_batch[number] = loss;
        else
            totals.note_loss(number, loss, std::move(sums));
        return Progress::Done;
    };
    step_.last_loss = losses_.post(std::move(job));
}

} // namespace bellows
