// SPDX-License-Identifier: MIT
#pragma once

// Matrix products, D = alpha * A * B (+ D). nt, nn, tn say which operand is read transposed, as in
// DeepGEMM: nt takes A [M, K] and B [N, K]; nn B [K, N]; tn A [K, M] and B [K, N]. Storage f32 or
// bf16 for each operand, sums f32 in ascending k. Where A and B are bf16, the device's numeric
// class (gemm_plan.hpp) says whether matrix units compute the product; all else is f32 arithmetic.
// Either way an element's bits do not depend on M, N, the batch, the group or the tile. Rows may be
// any distance apart (strides of the views); the last stride is 1. accumulate: false overwrites D,
// true adds to it. All throw Error{InvalidArgument} with the shapes when they do not fit together.
// The thread that owns the recording calls.

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <array>
#include <cstdint>

namespace bellows::ops {

/// a: [M, K] or [batch, M, K]; b: [N, K]; d: [M, N]; batched alike. D overlaps neither A nor B; its
/// rows begin at multiples of 4 bytes.
void gemm_nt(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate = false, float alpha = 1);
/// a: [M, K], b: [K, N].
void gemm_nn(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate = false, float alpha = 1);
/// a: [K, M], b: [K, N].
void gemm_tn(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate = false, float alpha = 1);

/// gemm_tn with too few elements of D to fill a device, but many k: runs of rows of a and b each
/// give a part of the sum, in `workspace`, and the parts are summed in ascending order. The sizes
/// alone say how long the runs are. workspace: gemm_tn_tall_workspace_bytes(k, m, n). d is f32,
/// contiguous, N a multiple of 4; no batches.
void gemm_tn_tall(Recording& recording, const TensorView& a, const TensorView& b,
                  const TensorView& d, bool accumulate, BufferView workspace);

/// Rows begins[g] .. ends[g] belong to group g: [groups] u32 on the device, begins[g] <= ends[g].
/// What lies between groups belongs to none.
struct GroupRanges {
    TensorView begins, ends;
};
/// Groups side by side: offsets is [groups + 1] u32, ascending, ends[g] = begins[g + 1].
GroupRanges group_ranges(const TensorView& offsets);

/// The work list of grouped products over rows that the host cannot count. One list serves all
/// products over the same rows whose number of output columns it was made for.
struct GroupTiles {
    static constexpr std::size_t kMaxShapes = 4;

    GroupRanges rows;
    BufferView tiles;
    BufferView arguments;
    std::uint32_t tile_rows = 0;
    std::uint32_t width_on_units = 1;
    std::array<std::uint64_t, kMaxShapes> columns{}; ///< N of the products; 0: unused

    /// Tiles for which there is room.
    std::uint64_t capacity() const noexcept { return tiles.bytes / 8; }
    /// The grid of indirect dispatches for N columns, tiles by ceil(N / 32), or on matrix units by
    /// the tiles of width_on_units; no memory if the list was not made for N.
    BufferView grid(std::uint64_t n, bool on_units) const;
};

/// Device memory that a work list takes.
std::uint64_t group_tiles_bytes(const Device& device, std::uint64_t max_rows, std::uint64_t groups);
/// Records the making of the list in `memory`; max_rows bounds the rows of all groups together.
GroupTiles make_group_tiles(Recording& recording, const GroupRanges& rows, std::uint64_t max_rows,
                            std::array<std::uint64_t, GroupTiles::kMaxShapes> columns,
                            BufferView memory);
GroupTiles make_group_tiles(Recording& recording, const TensorView& offsets, std::uint64_t max_rows,
                            std::array<std::uint64_t, GroupTiles::kMaxShapes> columns,
                            BufferView memory);

/// [groups] words on the device that say where groups stand. Ends: groups begin at multiples of
/// `spacing` rows, the first at 0, the others at the first one not below the end before. Counts:
/// group g begins at row g * spacing and has that many rows, `spacing` at most.
struct GroupSource {
    TensorView values;
    std::uint64_t spacing = 1;
    bool counts = false;
};
/// As above, and makes `rows`, none of them from max_rows on.
GroupTiles make_group_tiles(Recording& recording, const GroupSource& source,
                            const GroupRanges& rows, std::uint64_t max_rows,
                            std::array<std::uint64_t, GroupTiles::kMaxShapes> columns,
                            BufferView memory);

/// D[r] = alpha * A[r] * transpose(B[g]) for the rows of each group. a: [rows, K], b: [groups, N,
/// K], d: [rows, N]. Rows outside all groups are neither read nor written.
void grouped_gemm_nt(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const GroupTiles& tiles, bool accumulate = false,
                     float alpha = 1);
/// D[r] = alpha * A[r] * B[g]. b: [groups, K, N]: the input gradient from the same weights.
void grouped_gemm_nn(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const GroupTiles& tiles, bool accumulate = false,
                     float alpha = 1);
/// D[g] = alpha * transpose(A of g) * B of g, summed over the group's rows: the weight gradient.
/// a: [rows, M], b: [rows, N], d: [groups, M, N]. An empty group leaves D[g] when accumulating and
/// clears it otherwise.
void grouped_gemm_tn(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const GroupRanges& rows, bool accumulate = false,
                     float alpha = 1);
void grouped_gemm_tn(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const TensorView& offsets, bool accumulate = false,
                     float alpha = 1);

} // namespace bellows::ops
