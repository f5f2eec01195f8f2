// SPDX-License-Identifier: MIT
#pragma once

// What follows an update of which every rank has done a part: the ranks that hold the same matrices
// send each other what they made of theirs, bucket by bucket, and make of it what is made of whole
// matrices. Layers wait for their own weights alone. All ranks of a stage have the same buckets, in
// the same order.

#include "gradient_reduction.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/model/parameter_store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace bellows {

/// Hands in that of each bucket that is shared out all ranks get the others' parts of a flat f32
/// tensor of the store. All of them do the same.
void gather_parts(const TensorView& flat, std::span<const GradientRange> buckets,
                  Collectives& dense, Collectives& replicas);

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

} // namespace bellows
