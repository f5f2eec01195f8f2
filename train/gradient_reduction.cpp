// SPDX-License-Identifier: MIT
#include "gradient_reduction.hpp"

#include <utility>

namespace bellows {

std::vector<GradientRange> gradient_ranges(const ParameterStore& parameters, const Stage& stage) {
    std::vector<GradientRange> ranges;
    const std::vector<Parameter>& all = parameters.all();
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (!all[i].info.trainable() || !stage.has(all[i].info))
            continue;
        const std::uint64_t end =
            i + 1 < all.size() ? all[i + 1].first : parameters.num_elements(); // with the padding
        ranges.push_back({all[i].first, end - all[i].first,
                          all[i].info.kind == ParameterKind::Expert,
                          stage.gradient_ready_after(all[i].info), all[i].info.weight_decay,
                          divisible_by(all[i].info)});
    }
    return ranges;
}

GradientReduction::GradientReduction(const ParameterStore& parameters,
                                     std::vector<GradientRange> buckets, Collectives& dense,
                                     Collectives& replicas)
    : flat_(parameters.flat_gradients()), buckets_(std::move(buckets)), dense_(dense),
      replicas_(replicas) {
}

void GradientReduction::node_handed_in(std::size_t index, std::size_t num_nodes) {
    if (until_ == handed_in_.size()) { // a new step
        handed_in_.assign(num_nodes, false);
        until_ = next_ = 0;
    }
    handed_in_[index] = true;
    while (until_ < num_nodes && handed_in_[until_])
        ++until_;
    for (; next_ < buckets_.size() && buckets_[next_].ready_after < until_; ++next_) {
        const GradientRange& bucket = buckets_[next_];
        Collectives& ranks = bucket.expert ? replicas_ : dense_;
        if (ranks.group().size() == 1)
            continue;
        const TensorView all = flat_.rows(bucket.first, bucket.count);
        if (bucket.shares.empty()) {
            ranks.all_reduce(all);
            continue;
        }
        const Share own = bucket.share(ranks.position());
        ranks.reduce_scatter(all, flat_.rows(own.first, own.count), bucket.shares);
    }
}

} // namespace bellows
