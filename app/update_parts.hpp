// SPDX-License-Identifier: MIT
#pragma once

// What a rank updates of the parameters that it holds, when ranks with copies share the update out.

#include "app/gradient_reduction.hpp"
#include "app/optimizer.hpp"

#include <span>
#include <vector>

namespace bellows {

/// A rank among those that hold copies.
struct CopyHolder {
    int position = 0;   ///< in their group
    bool stands = true; ///< for what all of them update
};

/// This rank's shares of the buckets, a part each in their order, and what is not shared out behind
/// them: it is updated while the shares travel.
std::vector<UpdatePart> update_parts(std::span<const GradientRange> buckets, CopyHolder dense,
                                     CopyHolder replica);

} // namespace bellows
