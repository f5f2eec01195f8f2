// SPDX-License-Identifier: MIT
#pragma once

// Which rows of an activation belong to which group (expert), told by the device in one of five
// ways, and the work list that grouped products need. The host never learns a count. The thread
// that owns the recording calls.

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/engine/recording.hpp>

#include <array>
#include <cstdint>
#include <string>

namespace bellows::fp8 {

/// Rows that belong to no group (padding) are neither read nor written by grouped products.
struct GroupLayout {
    enum class Form : std::uint8_t {
        PrefixSums,  ///< group g: rows values[g] .. values[g + 1]; values u32 [groups + 1]
        AlignedEnds, ///< group g ends before values[g] and begins at the next multiple of `spacing`
                     ///< rows after values[g - 1], the first at 0; DeepGEMM's "psum" layout
        RowGroups,   ///< values i32 [rows], each row's group, -1: padding; rows of a group stand
                     ///< together; DeepGEMM's contiguous layout
        Masked,      ///< group g: the first values[g] of rows g * spacing .. (g + 1) * spacing
        Ids,         ///< values i32 [tokens, top_k], as a router gives them: the group of each row,
             ///< row token * top_k + k; any other number: none. Rows of a group stand anywhere
    };

    Form form = Form::PrefixSums;
    TensorView values;
    std::uint64_t groups = 0;
    std::uint64_t rows = 0;    ///< of the tensors, padding included
    std::uint64_t spacing = 0; ///< AlignedEnds, Masked
    /// Rows of a group on average, if the host can tell: a hint for speed alone, 0 without. Masked
    /// groups are otherwise expected to have few (64 at most), others their share of the rows.
    std::uint64_t expected_rows = 0;

    /// offsets: u32 [groups + 1], ascending, none above `rows`.
    static GroupLayout prefix_sums(const TensorView& offsets, std::uint64_t rows);
    /// ends: u32 or i32 [groups].
    static GroupLayout aligned_ends(const TensorView& ends, std::uint64_t alignment,
                                    std::uint64_t rows);
    /// ids: i32 [rows].
    static GroupLayout row_groups(const TensorView& ids, std::uint64_t groups);
    /// counts: u32 or i32 [groups]; more than max_rows count as max_rows.
    static GroupLayout masked(const TensorView& counts, std::uint64_t max_rows);
    /// topk_ids: i32 [tokens, top_k]; those of tokens from its row_count on count as none.
    static GroupLayout by_ids(const TensorView& topk_ids, std::uint64_t groups);
};

/// "4 groups in 512 rows (aligned ends)".
std::string describe(const GroupLayout& layout);

/// A layout's work list, made once for all products over these rows (make_grouped_rows), or none
/// (unlisted_rows); and, for m_grouped contiguous products alone, where their rows stand if not in
/// the layout's order.
struct GroupedRows {
    GroupLayout layout;
    ops::GroupTiles tiles;
    /// i32 [layout.rows]: the slot (token * top_k + k) of each row of a group, no two alike; -1:
    /// padding, of which D gets no row, or an unspecified one where D is not by slot.
    TensorView slots = {};
    /// Not 0: the row of A is slots[r] / slots_per_a_row, as many as there are tokens; of a layout
    /// by ids, whose rows are slots, r / slots_per_a_row.
    std::uint32_t slots_per_a_row = 0;
    /// The row of D is slots[r].
    bool d_by_slot = false;

    bool listed() const noexcept { return static_cast<bool>(tiles.tiles); }
};

/// Any first row of a group works; products are fastest where it is a multiple of this.
std::uint32_t m_alignment(const Device& device) noexcept;

/// Device memory that make_grouped_rows takes.
std::uint64_t grouped_rows_bytes(const Device& device, const GroupLayout& layout);
/// Records the making of the work list in `memory`. columns: the N of the m_grouped products that
/// will use it; 0: unused. Throws Error{InvalidArgument}.
GroupedRows make_grouped_rows(Recording& recording, const GroupLayout& layout,
                              const std::array<std::uint64_t, ops::GroupTiles::kMaxShapes>& columns,
                              BufferView memory);

/// The rows of a layout without a work list: nothing is recorded. Products of few rows on matrix
/// units (Variant::Streamed) read the layout itself, in one dispatch, and packed ones the counts of
/// masked layouts of up to 1024 rows per group; others make the list they need in their workspace,
/// each anew, and by_ids layouts the placement of rows too. Of a layout by ids the result has
/// slots_per_a_row = top_k: a row of A for each token.
GroupedRows unlisted_rows(const GroupLayout& layout);

/// Records ops::moe_layout of topk_ids and the making of the work list of its rows, together.
/// memory: grouped_rows_bytes of prefix sums of layout.row_to_slot's rows. The result has
/// layout.row_to_slot as its slots, which take no effect unless the caller asks for it.
GroupedRows make_grouped_rows(Recording& recording, const TensorView& topk_ids,
                              const ops::MoeLayout& layout, BufferView workspace,
                              const std::array<std::uint64_t, ops::GroupTiles::kMaxShapes>& columns,
                              BufferView memory);

} // namespace bellows::fp8
