// SPDX-License-Identifier: MIT
#pragma once

// Attention of a step's queries over a cache in blocks, in f64: grouped queries over heads of keys
// and values, and, with one head whose values are the beginning of its keys, latent attention in
// its absorbed form.

#include "verify/reference/gemm.hpp"

#include <cstdint>
#include <span>

namespace bellows::reference {

struct PagedShape {
    std::size_t heads = 1, kv_heads = 1; ///< head h uses head h / (heads / kv_heads) of keys
    std::size_t qk_dim = 0, v_dim = 0;
    double scale = 1;
    std::size_t block = 64;       ///< tokens of a block
    std::size_t table_blocks = 0; ///< of a sequence
};

/// Consecutive rows of queries; the last of them sees `keys` keys, each one before it one less.
struct PagedRows {
    std::size_t rows = 0, keys = 0, sequence = 0;
};

struct PagedResult {
    Vector out; ///< [rows, heads, v_dim], 0 for rows that see nothing
    Vector lse; ///< [rows, heads], +inf for rows that see nothing
};

/// q: [rows, heads, qk_dim], keys: [places, kv_heads, qk_dim], values: [places, kv_heads, v_dim],
/// tables: [sequences, table_blocks].
PagedResult paged_attention(View q, View keys, View values, std::span<const PagedRows> queries,
                            std::span<const std::uint32_t> tables, const PagedShape& shape);

/// Keys of the absorbed form: each row (latent, rope).
Vector latent_keys(View latent, View rope, std::size_t rows);

} // namespace bellows::reference
