// SPDX-License-Identifier: MIT
#pragma once

// Matrix products in f64, row-major. For a linear layer y = x·Wᵀ with x [rows, in], W [out, in]:
// forward gemm_nt(x, W), input-gradient gemm_nn(dy, W), weight-gradient gemm_tn(dy, x).

#include <cstddef>
#include <span>
#include <vector>

namespace bellows::reference {

using Vector = std::vector<double>;
using View = std::span<const double>;

/// A [m, k] · B [n, k]ᵀ -> [m, n].
Vector gemm_nt(View a, View b, std::size_t m, std::size_t n, std::size_t k);
/// A [m, k] · B [k, n] -> [m, n].
Vector gemm_nn(View a, View b, std::size_t m, std::size_t n, std::size_t k);
/// A [k, m]ᵀ · B [k, n] -> [m, n].
Vector gemm_tn(View a, View b, std::size_t m, std::size_t n, std::size_t k);

/// A [rows, columns] -> [columns, rows].
Vector transpose(View a, std::size_t rows, std::size_t columns);
/// |a|, element by element: gemm(|A|, |B|) bounds the rounding of gemm(A, B).
Vector absolute(View a);
/// a += b.
void accumulate(Vector& a, View b);

/// Throws std::invalid_argument naming `what` unless size == expected.
void require_size(const char* what, std::size_t size, std::size_t expected);

} // namespace bellows::reference
