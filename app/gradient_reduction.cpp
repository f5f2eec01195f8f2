// SPDX-License-Identifier: MIT
#include "app/gradient_reduction.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace bellows {

Share GradientRange::share(int member) const {
    if (shares.empty())
        return {first, count};
    const auto own = shares.begin() + member;
    return {std::accumulate(shares.begin(), own, first), *own};
}

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
                          stage.gradient_ready_after(all[i].info), all[i].info.weight_decay});
    }
    return ranges;
}

std::vector<GradientRange> gradient_buckets(std::span<const GradientRange> ranges,
                                            std::uint64_t least_bytes) {
    std::vector<GradientRange> buckets;
    // The backward pass ends with the first layer: gradients are ready from the end on.
    for (std::size_t i = ranges.size(); i-- > 0;) {
        const GradientRange& range = ranges[i];
        if (!buckets.empty()) {
            GradientRange& last = buckets.back();
            const bool neighbours = range.first + range.count == last.first &&
                                    range.expert == last.expert && range.matrices == last.matrices;
            const bool full = last.count * sizeof(float) >= least_bytes;
            // Not what is ready earlier, which would wait for the bucket.
            if (neighbours && (range.ready_after == last.ready_after ||
                               (range.ready_after > last.ready_after && !full))) {
                last.first = range.first;
                last.count += range.count;
                last.ready_after = range.ready_after;
                continue;
            }
        }
        buckets.push_back(range);
    }
    std::stable_sort(buckets.begin(), buckets.end(),
                     [](const GradientRange& a, const GradientRange& b) {
                         return a.ready_after < b.ready_after;
                     });
    return buckets;
}

void share_out(std::vector<GradientRange>& buckets, std::span<const GradientRange> ranges,
               std::uint64_t dense_members, std::uint64_t replica_members) {
    for (GradientRange& bucket : buckets) {
        const std::uint64_t members = bucket.expert ? replica_members : dense_members;
        if (!bucket.matrices || members < 2)
            continue;
        bucket.shares.assign(members, 0);
        for (const GradientRange& range : ranges) {
            if (range.first < bucket.first || range.first >= bucket.first + bucket.count)
                continue;
            const std::uint64_t middle = range.first - bucket.first + range.count / 2;
            bucket.shares[middle * members / bucket.count] += range.count;
        }
    }
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
