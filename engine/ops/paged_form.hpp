// SPDX-License-Identifier: MIT
#pragma once

// Which of its kernels attention over a paged cache takes, and in what shape.

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/engine/paged_attention.hpp>

#include <cstdint>
#include <optional>

namespace bellows {
class Device;
}

namespace bellows::ops {

/// A workgroup that shares what it reads of the cache (shaders/paged_attention.comp).
struct PagedTile {
    std::uint32_t local_size = 128;
    std::uint32_t pairs = 16, tile = 8, columns = 32;
};

/// Of entries with that many fours at once and values of value4; nothing where an invocation to
/// each row and head does better, or is all that the device can run.
std::optional<PagedTile> paged_tile(const Device& device, std::uint64_t entry4,
                                    std::uint64_t value4);

/// A workgroup on matrix units (shaders/paged_attention_coopmat.comp, which says what the fields
/// are).
struct PagedMatrixTile {
    MatrixShape shape;
    std::uint32_t bands = 1, parts = 1, block = 32;
    std::uint32_t few_bands = 1; ///< of steps with few rows to an item, as decoding is
    /// Weights stay in the invocations that hold their scores; else they pass through workgroup
    /// memory. Which of both is the device's and its numeric class's.
    std::optional<MatrixSlots> in_lane{};

    std::uint32_t warps() const { return bands * parts; }
    std::uint32_t pairs() const { return bands * shape.m; }
    std::uint64_t shared_bytes(const CacheShape& cache) const;
};

/// Where the numeric class of the device (GemmClass) has matrix units that serve such queries and
/// entries. Bits depend on `shape`, `parts` and `block`, which are those of the class.
std::optional<PagedMatrixTile> paged_matrix_tile(const Device& device, const CacheShape& cache,
                                                 DType queries);

/// For tests: what GPUs take on a CPU driver, too.
void share_paged_entries(Device& device, bool share);

} // namespace bellows::ops
