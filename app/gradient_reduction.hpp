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

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace bellows {

/// A run of a ParameterStore's flat gradients.
struct GradientRange {
    std::uint64_t first = 0, count = 0; ///< elements
    bool expert = false;                ///< summed over the replicas of this rank's experts only
    std::size_t ready_after = 0;        ///< the stage's weight-gradient node that completes it
    bool matrices = false;              ///< weights that decay; else gains
    /// Of one parameter: where it may be divided, at multiples of so many elements; 0: nowhere.
    std::uint64_t divisible_by = 0;
    /// By member of the group that sums it: elements whose sum it gets, the first member's first.
    /// Empty: every member gets all.
    std::vector<std::uint64_t> shares{};

    bool operator==(const GradientRange&) const = default;
    /// The elements of the flat gradients whose sum a member gets.
    Share share(int member) const;
};

/// Where a bucket is large enough to be sent on its own: a chunk of a collective. With 4 ranks on
/// lavapipe a step of "tiny" then takes the processor time that one sum after the step took.
constexpr std::uint64_t kGradientBucketBytes = 4 << 20;

/// The ranges of a stage's trained parameters, in flat order.
std::vector<GradientRange> gradient_ranges(const ParameterStore& parameters, const Stage& stage);

/// The same of parameters in_stored_order(), without a stage: as if what belongs to a layer were
/// ready at once, the head first, the embedding last.
std::vector<GradientRange> layer_ranges(std::span<const ParameterInfo> stored);

/// Joins neighbours into buckets of at least `least_bytes`, in the order in which they are ready.
/// What one node completes is never divided. ranges: in flat order, not overlapping.
std::vector<GradientRange> gradient_buckets(std::span<const GradientRange> ranges,
                                            std::uint64_t least_bytes);

/// Shares buckets of matrices out over the groups that sum them, so that all members get about as
/// many elements: of all buckets together, and of each as far as it can be divided. A part is what
/// stands side by side, divided where parameters are divisible. Gains are few, and all members want
/// them.
class Sharing {
public:
    Sharing(std::uint64_t dense_members, std::uint64_t replica_members)
        : dense_(dense_members, 0), replicas_(replica_members, 0) {}

    /// The next buckets; ranges: what they were made of.
    void share_out(std::vector<GradientRange>& buckets, std::span<const GradientRange> ranges);

    /// Elements of dense matrices or of experts that each member has got so far.
    const std::vector<std::uint64_t>& given(bool expert) const noexcept {
        return expert ? replicas_ : dense_;
    }

private:
    std::vector<std::uint64_t> dense_, replicas_;
};

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
