// SPDX-License-Identifier: MIT
#pragma once

// ZeRO-1: ranks that hold copies of the same parameters keep the optimiser's state once among them.
// Each gets the sums of its share of the gradients (reduce-scatter), updates that share with AdamW,
// and sends the others the weights that came of it (all-gather); gains, which are few, are summed
// and updated by all. Owned by the trainer; all ranks of a stage have the same buckets, so all post
// the same sums in the same order. What is summed with what does not depend on the buckets.

#include "expert_slots.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/shape/sharded_ranges.hpp>
#include <bellows/train/optimizer.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace bellows {

/// The ranges of a stage's trained parameters, in flat order.
std::vector<GradientRange> gradient_ranges(const ParameterStore& parameters, const Stage& stage);

/// The sums of a step's gradients, begun as the gradients become ready: while the last
/// micro-batch's weight-gradient nodes are being handed in, in any order, every bucket of
/// parameters follows when all nodes up to the one that completes it have been.
class GradientReduction {
public:
    /// All must outlive it. dense: the ranks that have the stage; replicas: those of them with the
    /// same experts. Of a bucket that is shared out a rank gets the sums of its own share; the rest
    /// keeps this rank's gradients.
    GradientReduction(const ParameterStore& parameters, std::vector<GradientRange> buckets,
                      Collectives& dense, Collectives& replicas);
    /// The gradients of the stage's experts are sums over these slots first.
    void sum_slots(const Stage& stage, ExpertSlots& slots);

    /// The last micro-batch's weight-gradient node `index` has been handed in, each of its
    /// num_nodes once. A bucket follows when all up to the one that completes it have been.
    void node_handed_in(std::size_t index, std::size_t num_nodes);

private:
    /// A layer whose slots' gradients are ready after a node.
    struct SlotLayer {
        std::size_t ready_after;
        std::uint64_t layer;
    };

    TensorView flat_;
    std::vector<GradientRange> buckets_;
    Collectives& dense_;
    Collectives& replicas_;
    ExpertSlots* slots_ = nullptr;
    std::vector<SlotLayer> slot_layers_; ///< as they become ready
    std::vector<bool> handed_in_;        ///< nodes of this step
    std::size_t until_ = 0;              ///< all nodes before have been
    std::size_t next_ = 0;               ///< bucket
    std::size_t next_layer_ = 0;         ///< of slot_layers_
};

/// A rank among those that hold copies.
struct CopyHolder {
    int position = 0;   ///< in their group
    bool stands = true; ///< for what all of them update
};

/// What this rank updates, in the order in which it is to: small buckets together, then its shares
/// of those that are shared out, a part each, and those that are not behind them, as they are
/// updated while the shares travel; both in the buckets' order.
std::vector<UpdatePart> update_parts(std::span<const GradientRange> buckets, CopyHolder dense,
                                     CopyHolder replica);

/// Hands in that of each bucket that is shared out all ranks get the others' parts of a flat f32
/// tensor of the store. All of them do the same.
void gather_parts(const TensorView& flat, std::span<const GradientRange> buckets,
                  Collectives& dense, Collectives& replicas);

/// What follows an update of which every rank has done a part: the ranks that hold the same
/// matrices send each other what they made of theirs, bucket by bucket, and make of it what is made
/// of whole matrices. Layers wait for their own weights alone.
class WeightGathering {
public:
    /// buckets: in the order in which their weights are updated; those that are not shared out are
    /// passed by. dense, replicas: as of the GradientReduction. All but `buckets` must outlive it.
    WeightGathering(const ParameterStore& parameters, std::span<const GradientRange> buckets,
                    Collectives& dense, Collectives& replicas);

    /// After the update was handed in. Waits for the copies of the step before, up to `limit`
    /// each.
    void begin(std::chrono::milliseconds limit);

private:
    struct Gather {
        Collectives* ranks;
        SentCopy copy;
    };
    struct Copies {
        std::unique_ptr<Recording> recording;
        TimePoint last;
    };

    Device& device_;
    std::vector<Gather> gathers_;
    std::vector<Copies> copies_; ///< of buckets, in their order
};

/// This rank among those that hold copies of the same parameters.
struct CopyGroup {
    Collectives& ranks;
    bool stands = true; ///< for what all of them update
};

/// All of it. One thread at a time.
class ShardedOptimizer {
public:
    /// stages: by phase, made of `parameters`; in_order: phases in the order of the forward pass.
    /// dense: the ranks that have the stages; replicas: those of them with the same experts.
    /// other_end: where one matrix is embedding and head and this rank has but one end of the
    /// model, this rank and the one that has the other end; else null. slots: where experts are
    /// placed in such; else null. All must outlive it.
    ShardedOptimizer(ParameterStore& parameters, std::span<const std::unique_ptr<Stage>> stages,
                     std::span<const std::uint32_t> in_order, const CopyGroup& dense,
                     const CopyGroup& replicas, Collectives* other_end, ExpertSlots* slots,
                     const OptimizerOptions& options);

    /// See GradientReduction::node_handed_in().
    void gradient_handed_in(std::size_t phase, std::size_t node, std::size_t num_nodes) {
        reductions_[phase].node_handed_in(node, num_nodes);
    }
    /// Hands in, when all gradients of a step have been, what is summed of a tied embedding's at
    /// the model's two ends.
    void finish_gradients();
    /// Hands step `step` (from 1 on) in: this rank's share, and the all-gather of the weights.
    /// Waits for the copies of weights of the step before, up to the options' timeout each.
    void update(std::uint64_t step, double lr, double clip);
    /// What all ranks keep a share of, whole, in the gradients' place. Waits.
    void gather(Parted what);
    /// AdamW on this rank's share.
    Optimizer& shard() noexcept { return *shard_; }

private:
    void tie_ends();

    ParameterStore& parameters_;
    Collectives& dense_;
    Collectives& replicas_;
    Collectives* other_end_;
    ExpertSlots* slots_;
    std::chrono::milliseconds timeout_;
    std::vector<GradientReduction> reductions_; ///< by phase
    std::vector<GradientRange> buckets_;        ///< all, as forward passes want the weights
    std::unique_ptr<Optimizer> shard_;
    std::unique_ptr<WeightGathering> gathering_;
    Share tied_share_;               ///< of the tied embedding's gradient, if there is one
    std::unique_ptr<Recording> tie_; ///< where this rank has both ends
};

} // namespace bellows
