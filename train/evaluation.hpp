// SPDX-License-Identifier: MIT
#pragma once

// The loss of text that a run does not train on, by the stages that train: forwards alone through
// the pipeline's chunks, one micro-batch of each stream at a time, so that no more slots are
// needed. Owned by the trainer; between steps.

#include "training_chunk.hpp"

#include <bellows/comm/host_collectives.hpp>
#include <bellows/pipeline/executor.hpp>
#include <bellows/schedule/schedule.hpp>
#include <bellows/shape/layout.hpp>
#include <bellows/train/sequence_source.hpp>

#include <chrono>
#include <cstdint>
#include <vector>

namespace bellows {

class Evaluation {
public:
    struct Desc {
        const Schedule& training;
        std::uint64_t place = 0, d = 0; ///< this rank's: of the pipeline, and among its dp
        std::uint64_t dp = 1;
        std::uint64_t sequences = 1; ///< of a micro-batch
        std::vector<int> world_ranks{};
        std::vector<PipelineChunk*> chunks{};
        PipelinePipes pipes{};
    };
    /// All that is handed in must outlive it.
    Evaluation(RunningStep& step, HostCollectives& everyone, Desc desc);

    /// Collective: nats per token, the mean over sequences [0, count), at least one, of step 0 of
    /// `source`; summed in the order of micro-batches, whatever the layout. Sequences that fill the
    /// last micro-batches up have no targets. Waits.
    double loss(const SequenceSource& source, std::uint64_t count);

private:
    double sum_over_ranks();

    RunningStep& step_;
    HostCollectives& everyone_;
    Desc desc_;
    Schedule schedule_;
    PipelineExecutor executor_;
    HeldOutLosses losses_;
};

/// A schedule's forward of the first micro-batch of each stream, which is numbered by its stream.
Schedule one_forward_of(const Schedule& schedule);

} // namespace bellows
