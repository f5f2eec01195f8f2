// SPDX-License-Identifier: MIT
#pragma once

// FP8 from its definition, without a trick: codes by their value, rounding by a search among all
// values, scales by trying exponents. The truth that fp8/ and its kernels are held against bit by
// bit. Pure functions, any thread.

#include <cstdint>
#include <vector>

namespace bellows::reference {

enum class Fp8Format : std::uint8_t { E4M3, E5M2 };

/// NaN for NaN codes, ±infinity for E5M2's.
double fp8_value(Fp8Format format, std::uint8_t code);
/// The code of the finite value nearest to x, of two equally near the even one; 0x7F for NaN.
std::uint8_t fp8_nearest(Fp8Format format, double x);

enum class Fp8Rule : std::uint8_t { PowerOfTwo, F32 };

/// Scale of a block by its largest |x|, and the factor that values are multiplied by.
float fp8_block_scale(Fp8Format format, Fp8Rule rule, float amax);
float fp8_inverse_scale(Fp8Rule rule, float scale);

/// A row-major matrix of `columns`, of which rows [row, row_end) and columns [column, column_end)
/// are one block.
struct Fp8Block {
    std::uint64_t row, row_end, column, column_end;
};

/// Writes the block's codes into `codes` (the matrix' size); returns its scale.
float fp8_quantize_block(const std::vector<float>& x, std::uint64_t columns, const Fp8Block& block,
                         Fp8Format format, Fp8Rule rule, std::vector<std::uint8_t>& codes);

} // namespace bellows::reference
