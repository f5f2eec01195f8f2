// SPDX-License-Identifier: MIT
#pragma once

// Where parameters stand in flat buffers, and how ranks that hold the same ones share their
// gradients' sums and their update out (ZeRO-1). Pure functions: all ranks get the same.

#include <bellows/base/rounding.hpp>
#include <bellows/shape/parameters.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// Elements that a parameter takes in the flat buffers, padding included.
std::uint64_t stored_elements(const ParameterInfo& info) noexcept;

/// In the order in which they stand in the flat buffers, one behind the other with their padding:
/// replicated matrices, replicated gains, router biases, experts; these by layer, matrix and
/// expert.
std::vector<ParameterInfo> in_stored_order(std::vector<ParameterInfo> parameters);

/// Elements that a parameter may be divided by among ranks, each of which updates a part: 128 rows
/// of a matrix, which FP8 copies have scales for. Of others all.
std::uint64_t divisible_by(const ParameterInfo& info) noexcept;

/// Sides of a block of FP8 weights that has one scale.
inline constexpr std::uint64_t kScaleRows = 128;

/// First values are made for at most so many elements at a time, or for one parameter.
inline constexpr std::uint64_t kInitialisedAtOnce = std::uint64_t{32} << 20;

/// Where a parameter stands among the ranges of a store: 0 replicated matrices, 1 replicated gains,
/// 2 router biases, 3 experts.
int stored_range_of(const ParameterInfo& info);
/// The last but one part of the name: "gate_up_proj" of "…experts.5.gate_up_proj.weight".
std::string matrix_of(const ParameterInfo& info);

/// A run of the flat gradients.
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
    /// A gradient of one end of a model whose embedding is its head, too. It is a bucket by itself,
    /// shared out alike at both ends, which add their sums.
    bool tied = false;
    bool counted = true; ///< false: of a tied one, at the end that does not stand for it

    bool operator==(const GradientRange&) const = default;
    /// The elements of the flat gradients whose sum a member gets.
    Share share(int member) const;
};

/// Where a bucket is large enough to be sent on its own: a chunk of a collective. With 4 ranks on
/// lavapipe a step of "tiny" then takes the processor time that one sum after the step took.
constexpr std::uint64_t kGradientBucketBytes = 4 << 20;

/// The ranges of trained parameters in_stored_order(), as if what belongs to a layer were ready at
/// once, the head first, the embedding last.
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

} // namespace bellows
