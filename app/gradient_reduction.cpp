// SPDX-License-Identifier: MIT
#include "app/gradient_reduction.hpp"

#include <algorithm>
#include <iterator>
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
                          stage.gradient_ready_after(all[i].info), all[i].info.weight_decay,
                          divisible_by(all[i].info)});
    }
    return ranges;
}

std::vector<GradientRange> layer_ranges(std::span<const ParameterInfo> stored) {
    std::int64_t layers = 0;
    for (const ParameterInfo& info : stored)
        layers = std::max(layers, info.layer + 1);
    std::vector<GradientRange> ranges;
    std::uint64_t first = 0;
    for (const ParameterInfo& info : stored) {
        const std::uint64_t count = stored_elements(info);
        const std::int64_t ready = info.layer >= 0                         ? layers - info.layer
                                   : info.kind == ParameterKind::Embedding ? layers + 1
                                                                           : 0;
        if (info.trainable())
            ranges.push_back({first, count, info.kind == ParameterKind::Expert,
                              static_cast<std::size_t>(ready), info.weight_decay,
                              divisible_by(info)});
        first += count;
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

namespace {

/// Where a bucket may be divided, its beginning and its end included.
std::vector<std::uint64_t> places_to_divide(const GradientRange& bucket,
                                            std::span<const GradientRange> ranges) {
    std::vector<std::uint64_t> places{0, bucket.count};
    for (const GradientRange& range : ranges)
        if (range.first >= bucket.first && range.first < bucket.first + bucket.count)
            for (std::uint64_t at = 0; at < range.count;
                 at += range.divisible_by > 0 ? range.divisible_by : range.count)
                places.push_back(range.first - bucket.first + at);
    std::ranges::sort(places);
    return places;
}

std::uint64_t nearest(std::span<const std::uint64_t> ascending, std::uint64_t wanted) {
    const auto above = std::ranges::lower_bound(ascending, wanted);
    if (above == ascending.begin())
        return *above;
    const std::uint64_t below = *std::prev(above);
    return above == ascending.end() || wanted - below <= *above - wanted ? below : *above;
}

} // namespace

void Sharing::share_out(std::vector<GradientRange>& buckets,
                        std::span<const GradientRange> ranges) {
    for (GradientRange& bucket : buckets) {
        std::vector<std::uint64_t>& given = bucket.expert ? replicas_ : dense_;
        if (!bucket.matrices || given.size() < 2)
            continue;
        const std::vector<std::uint64_t> places = places_to_divide(bucket, ranges);
        // Each is wanted to have as many as all others then.
        const std::uint64_t all =
            std::accumulate(given.begin(), given.end(), bucket.count) / given.size();
        std::vector<double> wanted;
        for (const std::uint64_t has : given)
            wanted.push_back(has < all ? static_cast<double>(all - has) : 0.0);
        const double sum = std::accumulate(wanted.begin(), wanted.end(), 0.0);
        double until = 0;
        std::uint64_t begin = 0;
        for (std::size_t member = 0; member < given.size(); ++member) {
            until += sum > 0 ? wanted[member] / sum : 1.0;
            const auto at = static_cast<std::uint64_t>(until * static_cast<double>(bucket.count));
            const std::uint64_t end =
                member + 1 == given.size() ? bucket.count : std::max(begin, nearest(places, at));
            bucket.shares.push_back(end - begin);
            given[member] += end - begin;
            begin = end;
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
