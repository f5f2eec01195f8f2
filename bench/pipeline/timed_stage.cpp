// SPDX-License-Identifier: MIT
#include "pipeline/timed_stage.hpp"

#include <chrono>
#include <optional>

namespace bellows::bench {

namespace {

/// Depends on both and on their order.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    return (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xff51afd7ed558ccdu + (a >> 31);
}

/// Of the numbers that a stage mixes in on the way back.
constexpr std::uint64_t kBack = std::uint64_t{1} << 32;

using Clock = std::chrono::steady_clock;

} // namespace

TimedStage::TimedStage(Device& device, Lane& lane, const Schedule& schedule, std::uint64_t rank,
                       std::uint32_t phase, const StageCosts& costs)
    : lane_(lane), chunk_(schedule.chunks[rank][phase]), num_stages_(schedule.num_stages),
      first_micro_batch_(schedule.first_of_stream(chunk_.stream)),
      num_micro_batches_(schedule.num_micro_batches / schedule.num_streams), costs_(costs) {
    for (std::uint64_t slot = 0; slot < schedule.peak_in_flight(rank, phase); ++slot)
        for (std::array<Buffer, kNumPlaces>& buffers = slots_.emplace_back();
             Buffer & buffer : buffers)
            buffer = Buffer(device, {.name = "number", .bytes = 16, .kind = MemoryKind::Readback});
}

TensorView TimedStage::number(std::uint64_t slot, Place place) const {
    return slots_[slot][place].tensor(DType::U32, {2});
}

std::uint64_t TimedStage::through(std::uint64_t value, std::uint64_t micro_batch) {
    const std::uint64_t made = mix(first() ? micro_batch : value, chunk_.stage);
    forward_sum_ = mix(mix(forward_sum_, made), micro_batch);
    return made;
}

std::uint64_t TimedStage::back(std::uint64_t value, std::uint64_t) {
    return mix(value, kBack + chunk_.stage);
}

std::uint64_t TimedStage::add(std::uint64_t value, std::uint64_t micro_batch) {
    sum_ = mix(mix(sum_, value), micro_batch);
    return value;
}

TimePoint TimedStage::post(OpKind kind, std::uint64_t micro_batch, std::uint64_t slot,
                           std::pair<Place, Place> way, double seconds, Change change) {
    const Buffer &source = slots_[slot][way.first], &target = slots_[slot][way.second];
    LaneJob job;
    job.name = to_name({kind, 0, micro_batch});
    job.accesses = {{source.view(), Access::Read}, {target.view(), Access::Write}};
    job.step = [=, this, &source, &target,
                began = std::optional<Clock::time_point>()](LaneContext&) mutable {
        if (!began)
            began = Clock::now();
        if (Clock::now() - *began < std::chrono::duration<double>(seconds))
            return Progress::Again;
        target.mapped_as<std::uint64_t>()[0] =
            (this->*change)(source.mapped_as<std::uint64_t>()[0], micro_batch);
        return Progress::Done;
    };
    return last_job_ = lane_.post(std::move(job));
}

TimePoint TimedStage::submit(OpKind op, std::size_t, std::uint64_t micro_batch, std::uint64_t slot,
                             std::span<const TimePoint>) { // all on one lane
    if (op == OpKind::Forward)
        return post(op, micro_batch, slot, {kInput, kOutput}, costs_.forward, &TimedStage::through);
    if (op == OpKind::InputGradient) // the last stage starts from what it has made
        return post(op, micro_batch, slot, {last() ? kOutput : kOutputGradient, kInputGradient},
                    costs_.input_gradient, &TimedStage::back);
    return post(op, micro_batch, slot, {kInputGradient, kInputGradient}, costs_.weight_gradient,
                &TimedStage::add);
}

std::uint64_t TimedStage::sum() {
    last_job_.wait();
    return sum_;
}

std::uint64_t TimedStage::forward_sum() {
    last_job_.wait();
    return forward_sum_;
}

std::uint64_t TimedStage::expected_forward_sum(std::uint64_t steps) const {
    std::uint64_t sum = 0;
    for (std::uint64_t step = 0; step < steps; ++step)
        for (std::uint64_t i = 0; i < num_micro_batches_; ++i) {
            std::uint64_t value = first_micro_batch_ + i;
            for (std::uint64_t stage = 0; stage <= chunk_.stage; ++stage)
                value = mix(value, stage);
            sum = mix(mix(sum, value), first_micro_batch_ + i);
        }
    return sum;
}

std::uint64_t TimedStage::expected_sum(std::uint64_t steps) const {
    std::uint64_t sum = 0;
    for (std::uint64_t step = 0; step < steps; ++step)
        for (std::uint64_t i = 0; i < num_micro_batches_; ++i) {
            const std::uint64_t micro_batch = first_micro_batch_ + i;
            std::uint64_t value = micro_batch;
            for (std::uint64_t stage = 0; stage < num_stages_; ++stage)
                value = mix(value, stage);
            for (std::uint64_t stage = num_stages_; stage-- > chunk_.stage;)
                value = mix(value, kBack + stage);
            sum = mix(mix(sum, value), micro_batch);
        }
    return sum;
}

} // namespace bellows::bench
