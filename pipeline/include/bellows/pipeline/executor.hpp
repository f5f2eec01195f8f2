// SPDX-License-Identifier: MIT
#pragma once

// Runs a rank's part of any verified schedule: hands the ops of its chunks in, in the schedule's
// order, and moves activations and gradients between chunks. It never waits: what needs another
// rank's result is ordered behind its arrival, and a result leaves when its op has ended. One
// thread at a time.

#include <bellows/comm/pipe.hpp>
#include <bellows/pipeline/schedule.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace bellows {

/// What a rank does for one of its chunks. The calls hand work in and return. Slots are below
/// Schedule::peak_in_flight(); a slot's ops follow one another in the device's order of work. All
/// stages' tensors have the same size.
class PipelineChunk {
public:
    virtual ~PipelineChunk() = default;

    virtual void forward(std::uint64_t micro_batch, std::uint64_t slot) = 0;
    virtual void input_gradient(std::uint64_t micro_batch, std::uint64_t slot) = 0;
    virtual void weight_gradient(std::uint64_t micro_batch, std::uint64_t slot) = 0;

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

class PipelineExecutor {
public:
    /// rank: of the schedule; world_ranks: which rank of the world stands for each of it; chunks:
    /// this rank's by phase. All that is handed in must outlive it. Throws Error{InvalidArgument}
    /// as verify() does, and for numbers that do not fit.
    PipelineExecutor(Schedule schedule, std::uint64_t rank, std::vector<int> world_ranks,
                     std::vector<PipelineChunk*> chunks, PipelinePipes pipes);

    const Schedule& schedule() const noexcept { return schedule_; }
    /// Hands a step in.
    void run();

private:
    void forward(const ScheduleOp& op, std::uint64_t slot);
    void input_gradient(const ScheduleOp& op, std::uint64_t slot);
    /// The world's rank that has a stage in the stream of a chunk.
    int rank_of(const ScheduleChunk& chunk, std::uint64_t stage) const;

    Schedule schedule_;
    std::uint64_t rank_;
    std::vector<int> world_ranks_;
    std::vector<PipelineChunk*> chunks_;
    PipelinePipes pipes_;
    std::vector<std::vector<ChunkPlace>> places_;
    std::vector<std::uint64_t> slots_; ///< of each phase
};

} // namespace bellows
