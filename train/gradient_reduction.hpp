// SPDX-License-Identifier: MIT
#pragma once

// The data-parallel sums of a step's gradients, begun as the gradients become ready: while the last
// micro-batch's weight-gradient nodes are being handed in, in any order, every bucket of parameters
// follows when all nodes up to the one that completes it have been. Owned by the trainer; all ranks
// of a stage have the same buckets, so all post the same sums in the same order. What is summed
// with what does not depend on the buckets.

#include <bellows/comm/collectives.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <cstddef>
#include <vector>

namespace bellows {

/// The ranges of a stage's trained parameters, in flat order.
std::vector<GradientRange> gradient_ranges(const ParameterStore& parameters, const Stage& stage);

class GradientReduction {
public:
    /// All must outlive it. dense: the ranks that have the stage; replicas: those of them with the
    /// same experts. Of a bucket that is shared out a rank gets the sums of its own share; the rest
    /// keeps this rank's gradients.
    GradientReduction(const ParameterStore& parameters, std::vector<GradientRange> buckets,
                      Collectives& dense, Collectives& replicas);

    /// The last micro-batch's weight-gradient node `index` has been handed in, each of its
    /// num_nodes once. A bucket follows when all up to the one that completes it have been.
    void node_handed_in(std::size_t index, std::size_t num_nodes);

private:
    TensorView flat_;
    std::vector<GradientRange> buckets_;
    Collectives& dense_;
    Collectives& replicas_;
    std::vector<bool> handed_in_; ///< nodes of this step
    std::size_t until_ = 0;       ///< all nodes before have been
    std::size_t next_ = 0;        ///< bucket
};

} // namespace bellows
