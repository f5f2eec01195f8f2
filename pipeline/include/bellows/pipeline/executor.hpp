// SPDX-License-Identifier: MIT
#pragma once

// Runs a rank's part of any verified schedule: hands the ops of its chunks in, in the schedule's
// order, and moves activations and gradients between chunks. It never waits: what needs another
// rank's result is ordered behind its arrival, and a result leaves when its op has ended. One
// thread at a time.

#include <bellows/comm/pipe.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/pipeline/simulate.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace bellows {

/// What a rank does for one of its chunks. The calls hand work in and return when it will be done.
/// Slots are below Schedule::peak_in_flight(); a slot's ops follow one another in the device's
/// order of work. All stages' tensors have the same size.
class PipelineChunk {
public:
    virtual ~PipelineChunk() = default;

    virtual TimePoint forward(std::uint64_t micro_batch, std::uint64_t slot) = 0;
    virtual TimePoint input_gradient(std::uint64_t micro_batch, std::uint64_t slot) = 0;
    virtual TimePoint weight_gradient(std::uint64_t micro_batch, std::uint64_t slot) = 0;

    /// What comes from the stage before and its gradient, which goes back there; of all stages but
    /// the first.
    virtual TensorView input(std::uint64_t slot) const = 0;
    virtual TensorView input_gradient(std::uint64_t slot) const = 0;
    /// What goes to the stage behind and its gradient, which comes from there; of all but the last.
    virtual TensorView output(std::uint64_t slot) const = 0;
    virtual TensorView output_gradient(std::uint64_t slot) const = 0;
};

/// A pipe for each kind of message: between two ranks those of one kind keep their order
/// (verify()), but not those of both together.
struct PipelinePipes {
    Pipe* activations = nullptr; ///< null: there is but one stage
    Pipe* gradients = nullptr;
};

/// Where ops are watched: each is a job of the lane, from when the op before it has ended and what
/// it needs has come until it has ended; a Backward is two. Of ops that the device overlaps the
/// later one is seen from the earlier one's end on.
struct PipelineWatch {
    Lane* lane = nullptr;                                           ///< null: nobody watches
    std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout; ///< of an op
};

/// An op as it ran, in seconds of the host's steady clock.
struct TimedOp {
    ScheduleOp op;
    OpTime time;
};

class PipelineExecutor {
public:
    /// rank: of the schedule; world_ranks: which rank of the world stands for each of it; chunks:
    /// this rank's by phase. All that is handed in must outlive it. Throws Error{InvalidArgument}
    /// as verify() does, and for numbers that do not fit.
    PipelineExecutor(Schedule schedule, std::uint64_t rank, std::vector<int> world_ranks,
                     std::vector<PipelineChunk*> chunks, PipelinePipes pipes,
                     PipelineWatch watch = {});

    const Schedule& schedule() const noexcept { return schedule_; }
    /// Hands a step in. A pair's two follow each other.
    void run();
    /// Waits for the last step's ops that are watched; their times in order, a Backward's halves
    /// apart. Empty where nobody watches.
    const std::vector<TimedOp>& timed();

private:
    void forward(const ScheduleOp& op, std::uint64_t slot);
    void input_gradient(const ScheduleOp& op, std::uint64_t slot);
    /// `op` is what ends at `done`, once `input` is there.
    void watch(const ScheduleOp& op, const TimePoint& input, const TimePoint& done);
    /// The world's rank that has a stage in the stream of a chunk.
    int rank_of(const ScheduleChunk& chunk, std::uint64_t stage) const;

    Schedule schedule_;
    std::uint64_t rank_;
    std::vector<int> world_ranks_;
    std::vector<PipelineChunk*> chunks_;
    PipelinePipes pipes_;
    PipelineWatch watch_;
    TimePoint last_watch_;
    /// By the lane's thread until last_watch_; its jobs may outlive this.
    std::shared_ptr<std::vector<TimedOp>> timed_ = std::make_shared<std::vector<TimedOp>>();
    std::vector<std::vector<ChunkPlace>> places_;
    std::vector<std::uint64_t> slots_; ///< of each phase
};

} // namespace bellows
