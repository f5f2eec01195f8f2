// SPDX-License-Identifier: MIT
#pragma once

// What follows an update of which every rank has done a part: the ranks that hold the same matrices
// send each other what they made of theirs, bucket by bucket, and make of it what is made of whole
// matrices. Layers wait for their own weights alone. All ranks of a stage have the same buckets, in
// the same order.

#include "app/gradient_reduction.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/model/parameter_store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace bellows {

class WeightGathering {
public:
    /// buckets: in the order in which their weights are updated; those that are not shared out are
    /// passed by. dense, replicas: as of the GradientReduction. All but `buckets` must outlive it.
    WeightGathering(const ParameterStore& parameters, std::span<const GradientRange> buckets,
                    Collectives& dense, Collectives& replicas);

    /// After the update was handed in. Waits for the step before, up to `limit`.
    void begin(std::chrono::milliseconds limit);

private:
    struct Gather {
        Collectives* ranks;
        TensorView mine, all;
        std::vector<std::uint64_t> counts; ///< elements of each member
    };

    void add(const ParameterStore& parameters, const GradientRange& bucket, Collectives& ranks);

    Device& device_;
    std::vector<Gather> gathers_;
    std::vector<std::unique_ptr<Recording>> transpositions_; ///< of buckets, in their order
    TimePoint last_;
};

} // namespace bellows
