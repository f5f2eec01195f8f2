// SPDX-License-Identifier: MIT
#pragma once

// A stage whose ops take the time that they are said to take, one after another on the rank's lane
// and without a core, and mix numbers: what arrives tells through which stages it came, and a sum
// which micro-batches' weight gradients it has in which order.

#include <bellows/engine/lane.hpp>
#include <bellows/pipeline/executor.hpp>
#include <bellows/schedule/simulate.hpp>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace bellows::bench {

class TimedStage : public PipelineChunk {
public:
    /// lane: of all the rank's stages. costs: in seconds.
    TimedStage(Device& device, Lane& lane, const Schedule& schedule, std::uint64_t rank,
               std::uint32_t phase, const StageCosts& costs);

    std::size_t num_nodes(OpKind) const override { return 1; }
    bool computes(OpKind, std::size_t) const override { return true; }
    QueueRole queue() const override { return QueueRole::Compute; }
    TimePoint submit(OpKind op, std::size_t node, std::uint64_t micro_batch, std::uint64_t slot,
                     std::span<const TimePoint> waits) override;
    TensorView input(std::uint64_t slot) const override { return number(slot, kInput); }
    TensorView output(std::uint64_t slot) const override { return number(slot, kOutput); }
    TensorView input_gradient(std::uint64_t slot) const override {
        return number(slot, kInputGradient);
    }
    TensorView output_gradient(std::uint64_t slot) const override {
        return number(slot, kOutputGradient);
    }

    /// Waits for all that has been handed in; what has been summed since the stage was made.
    std::uint64_t sum();
    /// What that must be after `steps` steps.
    std::uint64_t expected_sum(std::uint64_t steps) const;
    /// The same of what the stage's forwards have made.
    std::uint64_t forward_sum();
    std::uint64_t expected_forward_sum(std::uint64_t steps) const;

private:
    enum Place { kInput, kOutput, kOutputGradient, kInputGradient, kNumPlaces };
    using Change = std::uint64_t (TimedStage::*)(std::uint64_t value, std::uint64_t micro_batch);

    TensorView number(std::uint64_t slot, Place place) const;
    /// A job that takes `seconds` and makes the number at `to` from that at `from`.
    TimePoint post(OpKind kind, std::uint64_t micro_batch, std::uint64_t slot,
                   std::pair<Place, Place> way, double seconds, Change change);
    std::uint64_t through(std::uint64_t value, std::uint64_t micro_batch);
    std::uint64_t back(std::uint64_t value, std::uint64_t micro_batch);
    std::uint64_t add(std::uint64_t value, std::uint64_t micro_batch);
    bool first() const { return chunk_.stage == 0; }
    bool last() const { return chunk_.stage + 1 == num_stages_; }

    Lane& lane_;
    ScheduleChunk chunk_;
    std::uint64_t num_stages_, first_micro_batch_, num_micro_batches_;
    StageCosts costs_;
    std::vector<std::array<Buffer, kNumPlaces>> slots_;
    TimePoint last_job_;
    std::uint64_t sum_ = 0, forward_sum_ = 0; ///< on the lane
};

} // namespace bellows::bench
