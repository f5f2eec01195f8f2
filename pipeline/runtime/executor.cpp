// SPDX-License-Identifier: MIT
#include <bellows/engine/error.hpp>
#include <bellows/pipeline/executor.hpp>

#include <optional>
#include <string>
#include <utility>

namespace bellows {

namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

} // namespace

PipelineExecutor::PipelineExecutor(Schedule schedule, std::uint64_t rank,
                                   std::vector<int> world_ranks, std::vector<PipelineChunk*> chunks,
                                   PipelinePipes pipes, PipelineWatch watch)
    : schedule_(std::move(schedule)), rank_(rank), world_ranks_(std::move(world_ranks)),
      chunks_(std::move(chunks)), pipes_(pipes), watch_(watch) {
    verify(schedule_);
    const auto require = [](bool holds, const std::string& rule) {
        if (!holds)
            throw Error(ErrorCode::InvalidArgument, "pipeline: " + rule);
    };
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
    for (std::uint64_t phase = 0; phase < chunks_.size(); ++phase)
        slots_.push_back(schedule_.peak_in_flight(rank_, phase));
}

int PipelineExecutor::rank_of(const ScheduleChunk& chunk, std::uint64_t stage) const {
    return world_ranks_[places_[chunk.stream][stage].rank];
}

void PipelineExecutor::watch(const ScheduleOp& op, const TimePoint& input, const TimePoint& done) {
    if (watch_.lane == nullptr)
        return;
    LaneJob job;
    job.name = to_name(op);
    job.waits = {input};
    job.timeout = watch_.timeout;
    job.step = [timed = timed_, op, done, began = std::optional<double>()](LaneContext&) mutable {
        if (!began)
            began = now();
        if (!done.reached())
            return Progress::Again;
        timed->push_back({op, {*began, now()}});
        return Progress::Done;
    };
    last_watch_ = watch_.lane->post(std::move(job));
}

void PipelineExecutor::forward(const ScheduleOp& op, std::uint64_t slot) {
    const ScheduleChunk& at = schedule_.chunk_of(rank_, op);
    PipelineChunk& chunk = *chunks_[op.phase];
    TimePoint input;
    if (at.stage > 0)
        input = pipes_.activations->recv(rank_of(at, at.stage - 1), chunk.input(slot));
    watch(op, input, chunk.forward(op.micro_batch, slot));
    if (at.stage + 1 < schedule_.num_stages)
        pipes_.activations->send(rank_of(at, at.stage + 1), chunk.output(slot));
}

void PipelineExecutor::input_gradient(const ScheduleOp& op, std::uint64_t slot) {
    const ScheduleChunk& at = schedule_.chunk_of(rank_, op);
    PipelineChunk& chunk = *chunks_[op.phase];
    TimePoint input;
    if (at.stage + 1 < schedule_.num_stages)
        input = pipes_.gradients->recv(rank_of(at, at.stage + 1), chunk.output_gradient(slot));
    watch({OpKind::InputGradient, op.phase, op.micro_batch}, input,
          chunk.input_gradient(op.micro_batch, slot));
    if (at.stage > 0)
        pipes_.gradients->send(rank_of(at, at.stage - 1), chunk.input_gradient(slot));
}

void PipelineExecutor::run() {
    last_watch_ = {};
    timed_ = std::make_shared<std::vector<TimedOp>>();
    for (const ScheduleOp& op : schedule_.ops[rank_]) {
        const std::uint64_t first = schedule_.first_of_stream(schedule_.chunk_of(rank_, op).stream);
        const std::uint64_t slot = (op.micro_batch - first) % slots_[op.phase];
        if (op.kind == OpKind::Forward)
            forward(op, slot);
        if (op.kind == OpKind::Backward || op.kind == OpKind::InputGradient)
            input_gradient(op, slot);
        if (op.kind == OpKind::Backward || op.kind == OpKind::WeightGradient)
            watch({OpKind::WeightGradient, op.phase, op.micro_batch}, {},
                  chunks_[op.phase]->weight_gradient(op.micro_batch, slot));
    }
}

const std::vector<TimedOp>& PipelineExecutor::timed() {
    last_watch_.wait(watch_.timeout);
    return *timed_;
}

} // namespace bellows
