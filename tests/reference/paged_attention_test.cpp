// SPDX-License-Identifier: MIT
// Attention over a cache in blocks against attention over plain rows, and latent attention in its
// absorbed form against keys and values that are projected from the latents.

#include "support/compare.hpp"
#include "verify/reference/ops.hpp"
#include "verify/reference/paged_attention.hpp"

#include <gtest/gtest.h>

namespace bellows::reference {
namespace {

Vector numbers(std::size_t count, std::uint64_t seed) {
    return to_double(random_f32(count, seed));
}

TEST(PagedAttentionReference, BlocksHoldWhatPlainRowsHold) {
    const PagedShape shape{.heads = 4,
                           .kv_heads = 2,
                           .qk_dim = 3,
                           .v_dim = 5,
                           .scale = 0.7,
                           .block = 4,
                           .table_blocks = 3};
    const std::size_t keys = 9, rows = 2, k_row = 2 * 3, v_row = 2 * 5;
    const Vector q = numbers((rows + 1) * 4 * 3, 1), k = numbers(keys * k_row, 2),
                 v = numbers(keys * v_row, 3);
    const std::vector<std::uint32_t> table{9, 9, 9, 2, 0, 3}; // of sequences 0 and 1
    Vector cached_k(16 * k_row, 99), cached_v(16 * v_row, 99);
    for (std::size_t i = 0; i < keys; ++i) {
        const std::size_t place = table[3 + i / 4] * 4 + i % 4;
        for (std::size_t c = 0; c < k_row; ++c)
            cached_k[place * k_row + c] = k[i * k_row + c];
        for (std::size_t c = 0; c < v_row; ++c)
            cached_v[place * v_row + c] = v[i * v_row + c];
    }
    const std::vector<PagedRows> queries{{1, 0, 0}, {rows, keys, 1}};
    const PagedResult paged = paged_attention(q, cached_k, cached_v, queries, table, shape);
    const Attention plain = attention_forward(View(q).subspan(4 * 3), k, v,
                                              {.queries = rows,
                                               .keys = keys,
                                               .heads = 4,
                                               .qk_dim = 3,
                                               .v_dim = 5,
                                               .scale = 0.7,
                                               .kv_heads = 2});
    ASSERT_EQ(paged.out.size(), (rows + 1) * 4 * 5);
    for (std::size_t i = 0; i < paged.out.size(); ++i)
        EXPECT_EQ(paged.out[i], i < 4 * 5 ? 0 : plain.out[i - 4 * 5]);
    for (std::size_t i = 0; i < paged.lse.size(); ++i)
        EXPECT_EQ(paged.lse[i], i < 4 ? INFINITY : plain.lse[i % 4 * rows + i / 4 - 1]);
}

/// Scores and sums of latents, between the projections, are those of projected keys and values.
TEST(PagedAttentionReference, AbsorbedLatentsAreTheirKeysAndValues) {
    const std::size_t heads = 3, latent = 8, rope = 2, nope = 4, value = 5, keys = 7;
    const Vector c = numbers(keys * latent, 1), r = numbers(keys * rope, 2),
                 q_nope = numbers(heads * nope, 3), q_rope = numbers(heads * rope, 4),
                 up = numbers(heads * (nope + value) * latent, 5);
    const auto weight = [&](std::size_t h, std::size_t out, std::size_t in) {
        return up[(h * (nope + value) + out) * latent + in];
    };
    Vector q, absorbed, k, v;
    for (std::size_t h = 0; h < heads; ++h) {
        for (std::size_t i = 0; i < nope; ++i)
            q.push_back(q_nope[h * nope + i]);
        for (std::size_t in = 0; in < latent; ++in) {
            absorbed.push_back(0);
            for (std::size_t i = 0; i < nope; ++i)
                absorbed.back() += q_nope[h * nope + i] * weight(h, i, in);
        }
        for (Vector* to : {&q, &absorbed})
            to->insert(to->end(), q_rope.begin() + static_cast<std::ptrdiff_t>(h * rope),
                       q_rope.begin() + static_cast<std::ptrdiff_t>((h + 1) * rope));
    }
    const auto projected = [&](std::size_t key, std::size_t h, std::size_t out) {
        double sum = 0;
        for (std::size_t in = 0; in < latent; ++in)
            sum += weight(h, out, in) * c[key * latent + in];
        return sum;
    };
    for (std::size_t key = 0; key < keys; ++key)
        for (std::size_t h = 0; h < heads; ++h) {
            for (std::size_t i = 0; i < nope; ++i)
                k.push_back(projected(key, h, i));
            for (std::size_t i = 0; i < rope; ++i)
                k.push_back(r[key * rope + i]);
            for (std::size_t i = 0; i < value; ++i)
                v.push_back(projected(key, h, nope + i));
        }
    const Attention plain = attention_forward(q, k, v,
                                              {.queries = 1,
                                               .keys = keys,
                                               .heads = heads,
                                               .qk_dim = nope + rope,
                                               .v_dim = value,
                                               .scale = 0.4});
    const std::vector<PagedRows> queries{{1, keys, 0}};
    const std::vector<std::uint32_t> table{0};
    const PagedResult paged = paged_attention(absorbed, latent_keys(c, r, keys), c, queries, table,
                                              {.heads = heads,
                                               .kv_heads = 1,
                                               .qk_dim = latent + rope,
                                               .v_dim = latent,
                                               .scale = 0.4,
                                               .block = keys,
                                               .table_blocks = 1});
    for (std::size_t h = 0; h < heads; ++h) {
        EXPECT_NEAR(paged.lse[h], plain.lse[h], 1e-12);
        for (std::size_t i = 0; i < value; ++i) {
            double o = 0;
            for (std::size_t in = 0; in < latent; ++in)
                o += weight(h, nope + i, in) * paged.out[h * latent + in];
            EXPECT_NEAR(o, plain.out[h * value + i], 1e-12);
        }
    }
}

} // namespace
} // namespace bellows::reference
