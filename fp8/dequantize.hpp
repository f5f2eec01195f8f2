// SPDX-License-Identifier: MIT
#pragma once

// Dequantisation of the rows of groups alone.

#include <bellows/engine/gemm.hpp>
#include <bellows/fp8/recipe.hpp>

namespace bellows::fp8 {

/// As dequantize, but only rows that belong to a group; the others are neither read nor written.
/// Rank 2; no Columns128 blocks. quantized.codes.row_count is not looked at.
void dequantize_groups(Recording& recording, const Quantized& quantized, const TensorView& y,
                       const ops::GroupTiles& groups);

} // namespace bellows::fp8
