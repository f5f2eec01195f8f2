// SPDX-License-Identifier: MIT
#pragma once

// What a rank updates of the parameters that it holds, when ranks with copies share the update out.

#include "gradient_reduction.hpp"

#include <bellows/train/optimizer.hpp>

#include <span>
#include <vector>

namespace bellows {

/// A rank among those that hold copies.
struct CopyHolder {
    int position = 0;   ///< in their group
    bool stands = true; ///< for what all of them update
};

/// What this rank updates, in the order in which it is to: small buckets together, then its shares
/// of those that are shared out, a part each, and those that are not behind them, as they are
/// updated while the shares travel; both in the buckets' order.
std::vector<UpdatePart> update_parts(std::span<const GradientRange> buckets, CopyHolder dense,
                                     CopyHolder replica);

} // namespace bellows
