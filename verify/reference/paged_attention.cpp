// SPDX-License-Identifier: MIT
#include "verify/reference/paged_attention.hpp"

#include "verify/reference/ops.hpp"

#include <limits>

namespace bellows::reference {

namespace {

/// Rows of `size` at the places of a sequence's first `count` tokens.
Vector of_sequence(View x, std::size_t size, std::span<const std::uint32_t> table,
                   std::size_t count, std::size_t block) {
    Vector rows;
    for (std::size_t token = 0; token < count; ++token) {
        const std::size_t place = table[token / block] * block + token % block;
        for (std::size_t c = 0; c < size; ++c)
            rows.push_back(x[place * size + c]);
    }
    return rows;
}

} // namespace

PagedResult paged_attention(View q, View keys, View values, std::span<const PagedRows> queries,
                            std::span<const std::uint32_t> tables, const PagedShape& s) {
    PagedResult result;
    std::size_t first = 0;
    for (const PagedRows& of : queries) {
        if (of.keys == 0) {
            result.out.resize(result.out.size() + of.rows * s.heads * s.v_dim, 0);
            result.lse.resize(result.lse.size() + of.rows * s.heads,
                              std::numeric_limits<double>::infinity());
        } else {
            const auto table = tables.subspan(of.sequence * s.table_blocks, s.table_blocks);
            const std::size_t width = s.heads * s.qk_dim;
            const Vector mine(q.begin() + static_cast<std::ptrdiff_t>(first * width),
                              q.begin() + static_cast<std::ptrdiff_t>((first + of.rows) * width));
            const Attention attention = attention_forward(
                mine, of_sequence(keys, s.kv_heads * s.qk_dim, table, of.keys, s.block),
                of_sequence(values, s.kv_heads * s.v_dim, table, of.keys, s.block),
                {.batch = 1,
                 .queries = of.rows,
                 .keys = of.keys,
                 .heads = s.heads,
                 .qk_dim = s.qk_dim,
                 .v_dim = s.v_dim,
                 .scale = s.scale,
                 .kv_heads = s.kv_heads});
            result.out.insert(result.out.end(), attention.out.begin(), attention.out.end());
            for (std::size_t row = 0; row < of.rows; ++row)
                for (std::size_t head = 0; head < s.heads; ++head)
                    result.lse.push_back(attention.lse[head * of.rows + row]);
        }
        first += of.rows;
    }
    return result;
}

Vector latent_keys(View latent, View rope, std::size_t rows) {
    const std::size_t a = latent.size() / rows, b = rope.size() / rows;
    Vector keys;
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t c = 0; c < a; ++c)
            keys.push_back(latent[row * a + c]);
        for (std::size_t c = 0; c < b; ++c)
            keys.push_back(rope[row * b + c]);
    }
    return keys;
}

} // namespace bellows::reference
