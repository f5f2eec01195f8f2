// SPDX-License-Identifier: MIT
// Attention over a paged cache: what a row's bits depend on, the plan, bytes of FP8, refusals. The
// numbers themselves are the op tables' business.

#include "engine/ops/attention_tile.hpp"
#include "engine/ops/paged_form.hpp"
#include "support/op_test.hpp"
#include "verify/checks/op_checks.hpp"
#include "verify/checks/paged_rig.hpp"
#include "verify/reference/fp8.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/paged_attention.hpp>

#include <array>
#include <bit>
#include <cmath>

namespace bellows {
namespace {

using checks::heads_cache;
using checks::latent_cache;
using checks::PagedRig;
using checks::PagedSequence;
using ops::CacheShape;
using ops::kCacheBlock;
using ops::kNoPlace;
using testing::OpTensor;

class OpsPagedAttention : public testing::OpTest {
protected:
    void TearDown() override { as_usual(); }

    static void as_usual() {
        ops::share_paged_entries(device(), false);
        ops::pass_weights_through_memory(device(), false);
        use_gemm_class(device(), "");
    }

    /// The quick cases of the op table.
    static void expect_right_numbers() {
        for (const checks::OpCheck& check : checks::op_checks(checks::Depth::Quick)) {
            if (!check.what.starts_with("paged attention"))
                continue;
            const checks::Row row =
                checks::run_row(check.group, check.what, "", [&](checks::Check& of) {
                    check.body(of, checks::OpRig(device()));
                });
            EXPECT_EQ(row.verdict, checks::Verdict::Ok) << check.what << ": " << row.note;
        }
    }

    /// In the form that this device takes, in the one of GPUs, and in both on all matrix units that
    /// serve such queries and entries.
    template <class F>
    static void in_all_forms(DType act, const CacheShape& shape, const F& body) {
        for (const GemmClass& c : gemm_classes(device())) {
            if (!c.why_not.empty())
                continue;
            use_gemm_class(device(), c.name);
            if (c.units != GemmClass::Units::None && !ops::paged_matrix_tile(device(), shape, act))
                continue;
            for (const bool other : {false, true}) {
                SCOPED_TRACE(c.name + (other ? ", the other form" : ""));
                ops::share_paged_entries(device(), other);
                ops::pass_weights_through_memory(device(), other);
                body();
            }
        }
        as_usual();
    }

    /// Bits of so many rows of a result from row `first` on.
    static std::vector<std::uint32_t> bits(const PagedRig& rig, const PagedRig::Result& result,
                                           std::uint64_t first, std::uint64_t rows) {
        std::vector<std::uint32_t> words;
        const auto add = [&](const std::vector<float>& values, std::uint64_t width) {
            for (std::uint64_t i = first * width; i < (first + rows) * width; ++i)
                words.push_back(std::bit_cast<std::uint32_t>(values[i]));
        };
        add(result.o, rig.heads() * rig.v_dim());
        add(result.lse, rig.heads());
        return words;
    }
};

struct Kind {
    DType act;
    CacheShape shape;
    std::uint64_t heads;
};

std::vector<Kind> kinds() {
    return {{DType::F32, latent_cache(DType::F32, 16, 8), 3},
            {DType::BF16, latent_cache(DType::BF16, 64, 16), 16},
            {DType::BF16, latent_cache(DType::F8E4M3, 128, 16), 5},
            {DType::BF16, latent_cache(DType::F8E4M3, 256, 32), 16},
            {DType::F32, heads_cache(DType::BF16, 2, 12, 20), 6},
            {DType::BF16, heads_cache(DType::BF16, 2, 32, 16), 10}};
}

TEST_F(OpsPagedAttention, ARowsBitsAreItsOwn) {
    const std::vector<PagedSequence> all{{1, 1, 1},  {4, 700, 2},  {1, 0, 3},  {1, 64, 4},
                                         {2, 65, 5}, {37, 150, 6}, {3, 128, 7}};
    for (const Kind& kind : kinds())
        for (const std::uint64_t split : {1u, 2u, 8u})
            in_all_forms(kind.act, kind.shape, [&] {
                const PagedRig together(rig(), kind.act, kind.shape, kind.heads, all, 1),
                    elsewhere(rig(), kind.act, kind.shape, kind.heads, all, 2);
                const auto first = together.run(split);
                const auto expected = bits(together, first, 0, together.rows());
                for (const std::uint64_t rows_per_item : {1u, 3u, 16u}) {
                    const auto again = together.run(split, rows_per_item);
                    EXPECT_EQ(bits(together, again, 0, together.rows()), expected)
                        << rows_per_item << " rows per item";
                }
                EXPECT_EQ(bits(elsewhere, elsewhere.run(split), 0, together.rows()), expected)
                    << "in other blocks";
                std::uint64_t row = 0;
                for (const PagedSequence& s : all) {
                    const PagedRig alone(rig(), kind.act, kind.shape, kind.heads, {s}, 3);
                    EXPECT_EQ(bits(alone, alone.run(split), 0, s.rows),
                              bits(together, first, row, s.rows))
                        << s.rows << " rows of " << s.keys << " keys alone";
                    row += s.rows;
                }
            });
}

/// The last query of several is the one that a step of one query computes.
TEST_F(OpsPagedAttention, QueriesOfASequenceDoNotMix) {
    for (const Kind& kind : kinds())
        in_all_forms(kind.act, kind.shape, [&] {
            const PagedRig many(rig(), kind.act, kind.shape, kind.heads, {{5, 131, 1}}, 1);
            const auto all = many.run(1, 16);
            for (const std::uint64_t rows_per_item : {1u, 2u})
                EXPECT_EQ(bits(many, many.run(1, rows_per_item), 0, 5), bits(many, all, 0, 5));
        });
}

/// ops_table_test has the numbers as this device computes them.
TEST_F(OpsPagedAttention, EntriesMayBeShared) {
    ops::share_paged_entries(device(), true);
    if (!ops::paged_tile(device(), 6, 4))
        GTEST_SKIP() << "no subgroups of fixed size that shuffle";
    expect_right_numbers();
}

TEST_F(OpsPagedAttention, WeightsMayPassThroughWorkgroupMemory) {
    ops::pass_weights_through_memory(device(), true);
    std::size_t on_units = 0;
    for (const GemmClass& c : gemm_classes(device())) {
        if (!c.why_not.empty() || c.units == GemmClass::Units::None)
            continue;
        use_gemm_class(device(), c.name);
        expect_right_numbers();
        ++on_units;
    }
    if (on_units == 0)
        GTEST_SKIP() << "no matrix units";
}

/// What units can serve: their kernel takes entries of bf16 and FP8 where sizes suit its matrices.
TEST_F(OpsPagedAttention, MatrixUnitsServeWhatTheyCan) {
    const auto serves = [](const CacheShape& shape, DType queries) {
        return ops::paged_matrix_tile(device(), shape, queries).has_value();
    };
    std::size_t on_units = 0;
    for (const GemmClass& c : gemm_classes(device())) {
        if (!c.why_not.empty())
            continue;
        use_gemm_class(device(), c.name);
        const bool units = c.units != GemmClass::Units::None;
        on_units += units ? 1 : 0;
        const CacheShape heads = heads_cache(DType::BF16, 2, 128, 128);
        EXPECT_EQ(serves(heads, DType::BF16), units) << c.name;
        EXPECT_EQ(serves(latent_cache(DType::BF16, 512, 64), DType::BF16), units) << c.name;
        EXPECT_EQ(serves(latent_cache(DType::F8E4M3, 512, 64), DType::BF16), units) << c.name;
        EXPECT_FALSE(serves(heads, DType::F32)) << "queries would be rounded";
        EXPECT_FALSE(serves(heads_cache(DType::F32, 2, 128, 128), DType::BF16)) << "keys would be";
        EXPECT_FALSE(serves(heads_cache(DType::BF16, 2, 12, 20), DType::BF16));
        EXPECT_FALSE(serves(latent_cache(DType::F8E4M3, 256, 4), DType::BF16));
        EXPECT_FALSE(serves(latent_cache(DType::F8E4M3, 384, 64), DType::BF16)) << "three scales";
        for (const CacheShape& shape :
             {heads, latent_cache(DType::BF16, 512, 64), latent_cache(DType::F8E4M3, 512, 64)})
            if (const auto tile = ops::paged_matrix_tile(device(), shape, DType::BF16)) {
                EXPECT_LE(tile->shared_bytes(shape), device().info().shared_memory_bytes);
                EXPECT_LE(tile->shared_bytes(shape), 48u << 10) << "which every such device has";
                EXPECT_EQ(ops::kCacheBlock % tile->block, 0u);
            }
    }
    if (on_units == 0)
        GTEST_SKIP() << "no matrix units";
}

TEST_F(OpsPagedAttention, RowsWithoutKeysAreZero) {
    for (const DType act : {DType::F32, DType::BF16}) {
        const CacheShape shape = latent_cache(act, 16, 8);
        in_all_forms(act, shape, [&] {
            const PagedRig paged(rig(), act, shape, 3, {{2, 0, 1}, {1, 0, 2}}, 1);
            const auto result = paged.run(1);
            EXPECT_EQ(result.o, std::vector<float>(3 * 3 * 16, 0.0f));
            EXPECT_EQ(result.lse, std::vector<float>(3 * 3, INFINITY));
        });
    }
}

TEST_F(OpsPagedAttention, APlanOfNothingNeedsNoWorkspace) {
    const CacheShape shape = latent_cache(DType::F32, 16, 8);
    const Buffer memory(device(), {.name = "cache", .bytes = ops::cache_bytes(shape, 1)});
    const OpTensor q = tensor(DType::F32, {2, 3, 24}, random(DType::F32, 2 * 3 * 24, 1)),
                   o = result(DType::F32, {2, 3, 16}), lse = result(DType::F32, {2, 3});
    const ops::PagedPlan plan =
        ops::plan_paged_attention(std::array{ops::PagedQueries{2, 0, 0}}, 1, 1);
    const OpTensor items = tensor(DType::U32, {plan.items.size()}, plan.items),
                   rows = tensor(DType::U32, {2, 2}, plan.rows),
                   tables = result(DType::U32, {1, 1});
    const ops::PagedWork work{{2, plan.num_items(), plan.partials}, items, rows, tables};
    run([&](Recording& recording) {
        ops::paged_attention(recording, q, {shape, 1, memory.view()}, work, o, lse, 1, {});
    });
    EXPECT_EQ(read(o), std::vector<float>(2 * 3 * 16, 0.0f));
    EXPECT_EQ(read(lse), std::vector<float>(2 * 3, INFINITY));
}

TEST_F(OpsPagedAttention, BytesOfFp8AreThoseOfTheHost) {
    const CacheShape shape = latent_cache(DType::F8E4M3, 512, 64);
    ASSERT_EQ(ops::cache_token_bytes(shape), 656u);
    const std::uint64_t rows = 7;
    for (const DType act : {DType::F32, DType::BF16}) {
        auto latent = random(act, rows * 512, 1, -5, 5);
        const auto key = random(act, rows * 64, 2);
        std::fill_n(latent.begin() + 512, 128, 0.0f); // a block of zeros
        latent[1024] = 3e38f;                         // and one of a large scale
        latent[1536] = -0.0f;
        for (float& value : latent)
            value = act == DType::BF16 ? reference::round_to_bf16(value) : value;
        const OpTensor latent_t = tensor(act, {rows, 512}, latent);
        const OpTensor key_t = tensor(act, {rows, 64}, key);
        const std::vector<std::uint32_t> places{5, 63, 64, kNoPlace, 0, 127, 6};
        const OpTensor places_t = tensor(DType::U32, {rows}, places);
        const Buffer memory(device(), {.name = "cache", .bytes = ops::cache_bytes(shape, 2)});
        std::vector<std::byte> expected(ops::cache_bytes(shape, 2), std::byte{0xA5});
        device().upload(memory.view(), std::span<const std::byte>(expected));
        run([&](Recording& recording) {
            ops::cache_append_latent(recording, {shape, 2, memory.view()}, latent_t, key_t,
                                     places_t);
        });
        std::vector<std::uint8_t> codes(latent.size());
        for (std::uint64_t row = 0; row < rows; ++row) {
            if (places[row] == kNoPlace)
                continue;
            std::byte* entry = expected.data() + places[row] * 656;
            for (std::uint64_t block = 0; block < 4; ++block) {
                const float scale = reference::fp8_quantize_block(
                    latent, 512, {row, row + 1, 128 * block, 128 * block + 128},
                    reference::Fp8Format::E4M3, reference::Fp8Rule::F32, codes);
                std::memcpy(entry + 512 + 4 * block, &scale, 4);
            }
            std::memcpy(entry, codes.data() + row * 512, 512);
            for (std::uint64_t i = 0; i < 64; ++i) {
                const std::uint16_t half = reference::bf16_bits(key[row * 64 + i]);
                std::memcpy(entry + 528 + 2 * i, &half, 2);
            }
        }
        std::vector<std::byte> actual(expected.size());
        device().download(memory.view(), std::span<std::byte>(actual));
        EXPECT_EQ(actual, expected) << to_string(act);
    }
}

/// A row that sees one token gives back its values: all codes of E4M3 but NaN, with a scale of 1.
TEST_F(OpsPagedAttention, EveryCodeCountsForItsValue) {
    const CacheShape shape = latent_cache(DType::F8E4M3, 256, 32);
    const std::uint64_t heads = 3;
    std::vector<float> latent;
    for (std::uint32_t code = 0; code < 256; ++code)
        latent.push_back(static_cast<float>(reference::fp8_value(
            reference::Fp8Format::E4M3,
            static_cast<std::uint8_t>((code & 0x7F) == 0x7F ? code - 1 : code))));
    std::vector<float> expected;
    for (std::uint64_t head = 0; head < heads; ++head)
        expected.insert(expected.end(), latent.begin(), latent.end());
    const auto key = random(DType::BF16, 32, 1), query = random(DType::BF16, heads * 288, 2);
    const OpTensor latent_t = tensor(DType::BF16, {1, 256}, latent),
                   key_t = tensor(DType::BF16, {1, 32}, key),
                   places = tensor(DType::U32, {1}, std::vector<std::uint32_t>{5 * kCacheBlock}),
                   tables = tensor(DType::U32, {1, 1}, std::vector<std::uint32_t>{5}),
                   q = tensor(DType::BF16, {1, heads, 288}, query);
    const ops::PagedPlan plan =
        ops::plan_paged_attention(std::array{ops::PagedQueries{1, 1, 0}}, 1, 1);
    const OpTensor items = tensor(DType::U32, {plan.items.size()}, plan.items),
                   rows = tensor(DType::U32, {1, 2}, plan.rows);
    const ops::PagedWork work{{1, 1, 0}, items, rows, tables};
    const Buffer memory(device(), {.name = "cache", .bytes = ops::cache_bytes(shape, 6)});
    const ops::PagedCache cache{shape, 6, memory.view()};
    in_all_forms(DType::BF16, shape, [&] {
        const OpTensor o = result(DType::BF16, {1, heads, 256});
        run([&](Recording& recording) {
            ops::cache_append_latent(recording, cache, latent_t, key_t, places);
            ops::paged_attention(recording, q, cache, work, o, {}, 1, {});
        });
        EXPECT_EQ(read(o), expected);
    });
}

TEST_F(OpsPagedAttention, SaysWhatDoesNotFit) {
    const CacheShape shape = latent_cache(DType::BF16, 16, 8);
    const Buffer memory(device(), {.name = "cache", .bytes = ops::cache_bytes(shape, 2)});
    const ops::PagedCache cache{shape, 2, memory.view()};
    const OpTensor latent = result(DType::F32, {3, 16}), key = result(DType::F32, {3, 8}),
                   places = result(DType::U32, {3});
    Recording recording(device(), QueueRole::Compute, "refused");
    const auto append = [&](const ops::PagedCache& to, const TensorView& a, const TensorView& b) {
        ops::cache_append_latent(recording, to, a, b, places);
    };
    EXPECT_THROW(append(cache, key, key), Error);
    EXPECT_THROW(append({shape, 3, memory.view()}, latent, key), Error) << "too small";
    EXPECT_THROW(append({latent_cache(DType::F8E4M3, 16, 8), 2, memory.view()}, latent, key),
                 Error);
    EXPECT_THROW(append({heads_cache(DType::BF16, 1, 16, 8), 2, memory.view()}, latent, key),
                 Error);
    EXPECT_THROW(ops::cache_append_heads(recording, cache, latent, key, places), Error);
    EXPECT_THROW(ops::cache_copy_blocks(recording, cache, places), Error);
    const OpTensor q = result(DType::F32, {3, 2, 24}), o = result(DType::F32, {3, 2, 16});
    ops::PagedWork work;
    work.capacity = ops::paged_capacity(3, 1, 3, 1, 1);
    const OpTensor items = result(DType::U32, {work.capacity.item_words()}),
                   rows = result(DType::U32, {3, 2}), tables = result(DType::U32, {1, 1});
    work.items = items;
    work.rows = rows;
    work.tables = tables;
    const Buffer scratch = workspace(ops::paged_attention_workspace_bytes(work.capacity, 2, 16));
    const auto attend = [&](const TensorView& query, const TensorView& to, BufferView memory_of) {
        ops::paged_attention(recording, query, cache, work, to, {}, 1, memory_of);
    };
    EXPECT_THROW(attend(o, o, scratch.view()), Error);
    EXPECT_THROW(attend(q, q, scratch.view()), Error);
    EXPECT_THROW(attend(q, o, scratch.view().sub(0, 16)), Error);
    work.rows = tables;
    EXPECT_THROW(attend(q, o, scratch.view()), Error);
    EXPECT_EQ(recording.num_operations(), 0u);
}

TEST(PagedPlanTest, SplitsBlocksAndRows) {
    // 3 rows of sequence 2 that see 129, 130 and 131 keys, none, then one that sees 64.
    const std::vector<ops::PagedQueries> queries{{3, 131, 2}, {2, 0, 1}, {1, 64, 0}};
    const ops::PagedPlan plan = ops::plan_paged_attention(queries, 2, 2);
    const std::vector<std::uint32_t> items{
        5, 0, 0, 0,   0, 0, 0, 0, //
        0, 2, 2, 129, 0, 2, 0, 2, //
        0, 2, 2, 129, 2, 3, 1, 2, //
        2, 1, 2, 131, 0, 2, 4, 2, //
        2, 1, 2, 131, 2, 3, 5, 2, //
        5, 1, 0, 64,  0, 1, 6, 1,
    };
    EXPECT_EQ(plan.num_items(), 5u);
    EXPECT_EQ(plan.items, items);
    EXPECT_EQ(plan.rows, (std::vector<std::uint32_t>{0, 2, 2, 2, 4, 2, 0, 0, 0, 0, 6, 1}));
    EXPECT_EQ(plan.partials, 7u);
}

/// A row has only the parts that it sees itself, whatever later rows of its item see.
TEST(PagedPlanTest, RowsHaveTheirOwnParts) {
    const ops::PagedPlan plan =
        ops::plan_paged_attention(std::array{ops::PagedQueries{2, 65, 0}}, 1, 2);
    EXPECT_EQ(plan.num_items(), 2u);
    EXPECT_EQ(plan.rows, (std::vector<std::uint32_t>{0, 1, 2, 2}));
    EXPECT_EQ(plan.partials, 4u);
}

TEST(PagedPlanTest, StaysWithinTheCapacity) {
    reference::Random random(1);
    for (int i = 0; i < 2000; ++i) {
        const std::uint64_t split = 1 + random.below(4), per_item = 1 + random.below(5);
        std::vector<ops::PagedQueries> queries(1 + random.below(6));
        std::uint64_t rows = 0, blocks = 0;
        for (ops::PagedQueries& of : queries) {
            of.rows = random.below(9);
            of.keys = random.below(4) == 0 ? 0 : of.rows + random.below(500);
            rows += of.rows;
            for (std::uint64_t row = 0; row < of.rows && of.keys > 0; row += per_item) {
                const std::uint64_t last = std::min(of.rows, row + per_item) - 1;
                blocks += (of.keys - of.rows + 1 + last + kCacheBlock - 1) / kCacheBlock;
            }
        }
        const ops::PagedPlan plan = ops::plan_paged_attention(queries, split, per_item);
        const auto capacity = ops::paged_capacity(rows, queries.size(), blocks, split, per_item);
        EXPECT_LE(plan.num_items(), capacity.items);
        EXPECT_LE(plan.partials, capacity.partials);
        EXPECT_LE(plan.items.size(), capacity.item_words());
        EXPECT_EQ(plan.rows.size(), rows * ops::PagedPlan::kRowWords);
    }
}

TEST(PagedPlanTest, RefusesWhatCannotBe) {
    const std::array ok{ops::PagedQueries{2, 2, 0}}, few{ops::PagedQueries{3, 2, 0}};
    EXPECT_THROW(ops::plan_paged_attention(ok, 0, 1), Error);
    EXPECT_THROW(ops::plan_paged_attention(ok, 1, 0), Error);
    EXPECT_THROW(ops::plan_paged_attention(few, 1, 1), Error);
    EXPECT_THROW(ops::paged_capacity(1, 1, 1, 0, 1), Error);
    EXPECT_EQ(ops::plan_paged_attention({}, 1, 1).num_items(), 0u);
}

TEST(PagedCacheTest, SizesOfEntries) {
    EXPECT_EQ(ops::cache_token_bytes(latent_cache(DType::F8E4M3, 512, 64)), 656u);
    EXPECT_EQ(ops::cache_token_bytes(latent_cache(DType::BF16, 512, 64)), 1152u);
    EXPECT_EQ(ops::cache_token_bytes(latent_cache(DType::F32, 512, 64)), 2304u);
    EXPECT_EQ(ops::cache_token_bytes(heads_cache(DType::BF16, 4, 128, 128)), 2048u);
    EXPECT_EQ(ops::cache_token_bytes(latent_cache(DType::BF16, 12, 0)), 32u) << "whole units";
    EXPECT_EQ(ops::cache_bytes(latent_cache(DType::BF16, 512, 64), 3), 3u * 64 * 1152);
}

} // namespace
} // namespace bellows
