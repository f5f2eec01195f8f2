// SPDX-License-Identifier: MIT
#include "update_parts.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace bellows {

namespace {

/// The same elements in fewer, longer ranges.
UpdatePart joined(UpdatePart ranges) {
    std::ranges::sort(ranges, {}, &UpdatedRange::first);
    UpdatePart all;
    for (const UpdatedRange& range : ranges)
        if (!all.empty() && all.back().first + all.back().count == range.first &&
            all.back().weight_decay == range.weight_decay && all.back().counted == range.counted)
            all.back().count += range.count;
        else
            all.push_back(range);
    return all;
}

} // namespace

std::vector<UpdatePart> update_parts(std::span<const GradientRange> buckets, CopyHolder dense,
                                     CopyHolder replica) {
    std::vector<UpdatePart> shared, whole;
    UpdatePart small;
    for (const GradientRange& bucket : buckets) {
        const CopyHolder& rank = bucket.expert ? replica : dense;
        const Share mine = bucket.share(rank.position);
        if (mine.count == 0)
            continue;
        if (!bucket.shares.empty())
            shared.push_back({{mine.first, mine.count, bucket.matrices, true, true}});
        else if (mine.count * sizeof(float) >= kGradientBucketBytes)
            whole.push_back({{mine.first, mine.count, bucket.matrices, rank.stands}});
        else
            small.push_back({mine.first, mine.count, bucket.matrices, rank.stands});
    }
    std::vector<UpdatePart> parts;
    if (!small.empty())
        parts.push_back(joined(std::move(small)));
    std::ranges::move(shared, std::back_inserter(parts));
    std::ranges::move(whole, std::back_inserter(parts));
    return parts;
}

} // namespace bellows
