// SPDX-License-Identifier: MIT
#include "app/weight_gathering.hpp"

#include <utility>

namespace bellows {

WeightGathering::WeightGathering(const ParameterStore& parameters,
                                 std::span<const GradientRange> buckets, Collectives& dense,
                                 Collectives& replicas)
    : device_(parameters.device()) {
    for (const GradientRange& bucket : buckets)
        if (!bucket.shares.empty())
            add(parameters, bucket, bucket.expert ? replicas : dense);
}

void WeightGathering::add(const ParameterStore& parameters, const GradientRange& bucket,
                          Collectives& ranks) {
    const std::vector<TensorView> wholes = parameters.sent_copies(bucket.first, bucket.count);
    std::vector<std::vector<TensorView>> parts; // by member
    for (int member = 0; member < ranks.group().size(); ++member) {
        const Share share = bucket.share(member);
        parts.push_back(parameters.sent_copies(share.first, share.count));
    }
    for (std::size_t i = 0; i < wholes.size(); ++i) {
        if (wholes[i].num_elements() == 0)
            continue;
        Gather gather{&ranks, parts[static_cast<std::size_t>(ranks.position())][i], wholes[i], {}};
        for (const std::vector<TensorView>& part : parts)
            gather.counts.push_back(part[i].num_elements());
        gathers_.push_back(std::move(gather));
    }
    // Beside the compute queue: the first forward passes need none.
    auto transposition =
        std::make_unique<Recording>(device_, QueueRole::AsyncCompute, "transpose weights");
    parameters.transpose(*transposition, bucket.first, bucket.count);
    if (transposition->num_operations() > 0)
        transpositions_.push_back(std::move(transposition));
}

void WeightGathering::begin(std::chrono::milliseconds limit) {
    for (const Gather& gather : gathers_)
        gather.ranks->all_gather(gather.mine, gather.all, gather.counts);
    last_.wait(limit);
    for (const auto& transposition : transpositions_)
        last_ = device_.submit(*transposition);
}

} // namespace bellows
