// SPDX-License-Identifier: MIT
#pragma once

// One of a rank's stages as the pipeline's executor sees it, with what a step does beside its
// nodes: tokens go in and losses come out on lanes, gradients are cleared ahead of their first use
// and summed over the ranks when the last micro-batch's have been handed in. Owned by the trainer.

#include "gradient_clearing.hpp"
#include "sharded_optimizer.hpp"
#include "step_totals.hpp"
#include "token_lines.hpp"

#include <bellows/engine/lane.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/pipeline/executor.hpp>
#include <bellows/train/sequence_source.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace bellows {

/// What forwards alone come to on a rank.
struct HeldOutLosses {
    std::uint64_t num_sequences = 0; ///< those behind have no targets
    std::map<std::uint64_t, double> by_micro_batch{};
};

/// What the chunks of a rank share.
struct RunningStep {
    Device& device;
    std::chrono::milliseconds limit;     ///< of each wait for a node's last run
    std::uint64_t seq = 0;               ///< tokens of a sequence
    std::uint64_t first_micro_batch = 0; ///< of the global batch: this rank's first
    /// The token that ends a document, where attention stays within documents.
    std::optional<std::uint32_t> end_of_document{};
    std::uint64_t batch = 0; ///< sequences of the global batch, all micro-batches
    StepTotals& totals;
    GradientClearing* clearing = nullptr; ///< of the rank's gradients
    // Of the step that runs:
    std::uint64_t index = 0;
    double mtp_weight = 0; ///< of the mean loss of all MTP modules
    /// Tokens that each MTP module predicts in a whole global batch, of as many sequences as
    /// `batch` where this one has fewer.
    std::vector<double> predicted{};
    const SequenceSource* source = nullptr;
    TimePoint last_loss{};             ///< of those handed in
    HeldOutLosses* held_out = nullptr; ///< not null: forwards alone, which leave gradients alone
};

class TrainingChunk : public PipelineChunk {
public:
    struct Desc {
        std::uint32_t phase = 0;
        std::uint64_t stage = 0; ///< for names
    };
    /// What follows from the number of a step's micro-batches.
    struct Ends {
        std::uint64_t last_micro_batch = 0; ///< of the stage on this rank
        /// Whose forward is a step's first op, if it is this stage's.
        std::optional<std::uint64_t> opening{};
    };
    /// thread: of the lanes. All must outlive it.
    TrainingChunk(RunningStep& step, HostThread& thread, Stage& stage, ShardedOptimizer& optimizer,
                  const Desc& desc);

    /// Before the first step, and between steps of which the next has another batch.
    void begin_batch(const Ends& ends) { ends_ = ends; }

    std::size_t num_nodes(OpKind op) const override { return nodes(op, 0).size(); }
    bool computes(OpKind op, std::size_t node) const override {
        return nodes(op, 0)[node]->resource == NodeResource::Compute;
    }
    QueueRole queue() const override { return stage_.queue(); }
    TimePoint submit(OpKind op, std::size_t node, std::uint64_t micro_batch, std::uint64_t slot,
                     std::span<const TimePoint> waits) override;

    TensorView input(std::uint64_t slot) const override { return stage_.input(slot); }
    TensorView output(std::uint64_t slot) const override { return stage_.output(slot); }
    TensorView input_gradient(std::uint64_t slot) const override {
        return stage_.input_gradient(slot);
    }
    TensorView output_gradient(std::uint64_t slot) const override {
        return stage_.output_gradient(slot);
    }

private:
    const std::vector<const Node*>& nodes(OpKind op, std::uint64_t slot) const {
        return stage_.nodes(slot, node_kind(op));
    }
    TimePoint run(const Node& node, std::span<const TimePoint> waits);
    void clear_gradients(OpKind op, std::size_t node, std::uint64_t micro_batch);
    std::uint64_t sequences() const noexcept { return stage_.tokens() / step_.seq; }
    void post_data(std::uint64_t micro_batch, std::uint64_t slot);
    void write_data(LaneJob& job, std::uint64_t slot, const TokenLines& lines);
    void post_spared(std::uint64_t micro_batch, Buffer& buffer);
    void post_loss(std::uint64_t micro_batch, std::uint64_t slot);

    RunningStep& step_;
    Stage& stage_;
    ShardedOptimizer& optimizer_;
    Desc desc_;
    Ends ends_;
    TimePoint computed_; ///< the last node that computes
    std::unordered_map<const Node*, TimePoint> last_runs_;
    Lane data_, losses_; ///< apart: the next micro-batch's data does not wait for a loss
};

} // namespace bellows
