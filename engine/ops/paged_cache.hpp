// SPDX-License-Identifier: MIT
#pragma once

// What the ops on a paged cache share: a checked cache as their kernels want it.

#include "arguments.hpp"

#include <bellows/engine/paged_attention.hpp>

namespace bellows::ops {

struct PagedMemory {
    BufferView memory;
    std::uint32_t storage = 0; ///< as shaders/include/paged_entry.glsl numbers it
    std::uint32_t units = 0;   ///< 16 bytes of an entry
    std::uint32_t first4 = 0;  ///< fours of an entry's first part
    std::uint32_t second4 = 0; ///< and of its second
    std::uint32_t blocks = 0;
};

PagedMemory paged_memory(const Arguments& arguments, const PagedCache& cache);

} // namespace bellows::ops
