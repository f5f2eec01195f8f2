// SPDX-License-Identifier: MIT
#pragma once

// Work lists that products make in their own workspace (unlisted_rows).

#include <bellows/fp8/groups.hpp>

#include <cstdint>

namespace bellows::fp8 {

/// Memory of a list, with the placement of rows by ids.
std::uint64_t listing_bytes(const Device& device, std::uint64_t rows, std::uint64_t groups);
/// Records the making of a list of `rows`, which have none, for products of N = columns.
GroupedRows listed(Recording& recording, const GroupedRows& rows, std::uint64_t columns,
                   BufferView memory);

} // namespace bellows::fp8
