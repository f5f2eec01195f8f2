// SPDX-License-Identifier: MIT
#include "app/update_parts.hpp"

#include <algorithm>
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
    std::vector<UpdatePart> parts;
    UpdatePart rest;
    for (const GradientRange& bucket : buckets) {
        const CopyHolder& rank = bucket.expert ? replica : dense;
        const Share mine = bucket.share(rank.position);
        if (bucket.shares.empty())
            rest.push_back({mine.first, mine.count, bucket.matrices, rank.stands});
        else if (mine.count > 0)
            parts.push_back({{mine.first, mine.count, bucket.matrices, true, true}});
    }
    parts.push_back(joined(std::move(rest)));
    return parts;
}

} // namespace bellows
