// SPDX-License-Identifier: MIT
#include <bellows/shape/sharded_ranges.hpp>
#include <bellows/shape/vocabulary.hpp>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <tuple>
#include <utility>

namespace bellows {

namespace {

constexpr std::uint64_t kAlignment = 16; // elements: 64 bytes of f32

} // namespace

int stored_range_of(const ParameterInfo& info) {
    if (info.kind == ParameterKind::Expert)
        return 3;
    if (!info.trainable())
        return 2;
    return info.weight_decay ? 0 : 1;
}

std::string matrix_of(const ParameterInfo& info) {
    const std::size_t end = info.name.rfind('.');
    const std::size_t begin = info.name.rfind('.', end - 1) + 1;
    return info.name.substr(begin, end - begin);
}

std::uint64_t stored_elements(const ParameterInfo& info) noexcept {
    const bool of_vocabulary =
        info.kind == ParameterKind::Embedding || info.kind == ParameterKind::Head;
    return round_up(of_vocabulary ? padded_vocabulary(info.shape[0]) * info.shape[1] : info.size(),
                    kAlignment);
}

std::vector<ParameterInfo> in_stored_order(std::vector<ParameterInfo> parameters) {
    const auto key = [](const ParameterInfo& info) {
        const bool expert = info.kind == ParameterKind::Expert;
        // Experts of one layer and matrix side by side; all else keeps its order.
        return std::make_tuple(stored_range_of(info), expert ? info.layer : 0,
                               expert ? matrix_of(info) : std::string(), expert ? info.expert : 0);
    };
    std::ranges::stable_sort(parameters, {}, key);
    return parameters;
}

std::uint64_t divisible_by(const ParameterInfo& info) noexcept {
    const bool matrix = info.shape.size() == 2 && info.weight_decay;
    return matrix ? std::min(stored_elements(info), kScaleRows * info.shape[1])
                  : stored_elements(info);
}

Share GradientRange::share(int member) const {
    if (shares.empty())
        return {first, count};
    const auto own = shares.begin() + member;
    return {std::accumulate(shares.begin(), own, first), *own};
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
            ranges.push_back({first,
                              count,
                              info.kind == ParameterKind::Expert,
                              static_cast<std::size_t>(ready),
                              info.weight_decay,
                              divisible_by(info),
                              {},
                              info.tied});
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
                                    range.expert == last.expert &&
                                    range.matrices == last.matrices && !range.tied && !last.tied;
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
            wanted.push_back(has < all && !bucket.tied ? static_cast<double>(all - has) : 0.0);
        const double sum = std::accumulate(wanted.begin(), wanted.end(), 0.0);
        double until = 0;
        std::uint64_t begin = 0;
        for (std::size_t member = 0; member < given.size(); ++member) {
            until += sum > 0 ? wanted[member] / sum : 1.0 / static_cast<double>(given.size());
            const auto at = static_cast<std::uint64_t>(until * static_cast<double>(bucket.count));
            const std::uint64_t end =
                member + 1 == given.size() ? bucket.count : std::max(begin, nearest(places, at));
            bucket.shares.push_back(end - begin);
            given[member] += end - begin;
            begin = end;
        }
    }
}

} // namespace bellows
