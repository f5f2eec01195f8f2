// SPDX-License-Identifier: MIT
#include "weight_gathering.hpp"

#include <numeric>
#include <utility>

namespace bellows {

namespace {

/// This rank's part of `all` is sent; the others' come.
void gather(Collectives& ranks, const TensorView& all, std::span<const std::uint64_t> counts) {
    const auto own = counts.begin() + ranks.position();
    ranks.all_gather(all.rows(std::accumulate(counts.begin(), own, std::uint64_t{0}), *own), all,
                     counts);
}

} // namespace

void gather_parts(const TensorView& flat, std::span<const GradientRange> buckets,
                  Collectives& dense, Collectives& replicas) {
    for (const GradientRange& bucket : buckets)
        if (!bucket.shares.empty())
            gather(bucket.expert ? replicas : dense, flat.rows(bucket.first, bucket.count),
                   bucket.shares);
}

WeightGathering::WeightGathering(const ParameterStore& parameters,
                                 std::span<const GradientRange> buckets, Collectives& dense,
                                 Collectives& replicas)
    : device_(parameters.device()) {
    for (const GradientRange& bucket : buckets) {
        if (bucket.shares.empty())
            continue;
        for (SentCopy& copy : parameters.sent_copies(bucket.first, bucket.shares))
            gathers_.push_back({bucket.expert ? &replicas : &dense, std::move(copy)});
        // Beside the compute queue: first forward passes need none, but for packed FP8 weights.
        auto copies =
            std::make_unique<Recording>(device_, QueueRole::AsyncCompute, "copies of weights");
        parameters.make_copies(*copies, bucket.first, bucket.count);
        if (copies->num_operations() > 0)
            copies_.push_back({std::move(copies), {}});
    }
}

void WeightGathering::begin(std::chrono::milliseconds limit) {
    for (const Gather& of : gathers_)
        gather(*of.ranks, of.copy.whole, of.copy.counts);
    for (Copies& copies : copies_) {
        copies.last.wait(limit);
        copies.last = device_.submit(*copies.recording);
    }
}

} // namespace bellows
