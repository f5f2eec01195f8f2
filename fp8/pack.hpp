// SPDX-License-Identifier: MIT
#pragma once

// Operands of packed products as images of the registers that matrices are loaded into:
// shaders/include/fp8_packed.glsl.

#include "operands.hpp"
#include "product.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/fp8/groups.hpp>

#include <optional>

namespace bellows::fp8 {

/// Of which matrices images are made.
struct MatrixUnits {
    MatrixShape shape;
    std::uint32_t subgroup = 0;
    /// Of B: how many columns an invocation has elements of, and of which of them each element is,
    /// in four bits each. An element's own, where the device shows no pattern.
    std::uint32_t b_slots = 0, b_slot = 0;
};

/// Nothing when the device has no subgroup matrices of f16 that fit a step of 32 x 32. The first
/// call runs a kernel and waits for it (matrix_slots).
std::optional<MatrixUnits> units_for_images(const Device& device);

enum class Side : std::uint8_t { A, B };

/// Where kernels find the rows of A that are there: ROWS_* of include/fp8_packed.glsl.
enum class RowsFrom : std::uint32_t { Batch, List, Counts };

/// Where an operand's tiles come from.
struct Source {
    const Quantized& q;
    Side side;
    bool by_k = false;                 ///< memory has k as its rows
    const GroupedRows* rows = nullptr; ///< tiles of rows of groups, by slots if they say so
    const GroupLayout* sums = nullptr; ///< the sum goes over the rows of these groups
    BufferView counts = {};            ///< rows of each batch entry that are there; else all are

    RowsFrom rows_from() const noexcept {
        return rows != nullptr ? RowsFrom::List : counts ? RowsFrom::Counts : RowsFrom::Batch;
    }
};

struct Packed {
    BufferView image, factors, scales, peaks, spread;
    std::uint64_t blocks = 0;
};

/// False: the blocks of 128 x 128 have one scale each.
bool own_scales(const Quantized& q);

/// At most; `groups` of either operand.
std::uint64_t packed_bytes(const Quantized& q, Side side, std::uint64_t groups);

/// Of a B whose sum does not go over groups, in either form.
std::uint64_t prepacked_bytes(const Quantized& b);

/// Where pack() puts what it packs, from the front of `memory` on, which it shortens.
Packed place(const MatrixUnits& units, const Source& source, BufferView& memory);

/// Of place(units, source, ...), what entries [first, first + count) of the batch take: where they
/// are packed alone. Of B.
Packed entries(const MatrixUnits& units, const Source& source, const Packed& packed,
               std::uint64_t first, std::uint64_t count);

/// Records the packing into packed = place(...).
void pack(Recording& recording, const Operands& operands, const MatrixUnits& units,
          const Source& source, const Packed& packed);

} // namespace bellows::fp8
