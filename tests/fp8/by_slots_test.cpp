// SPDX-License-Identifier: MIT
// Grouped products from the ids of experts to results: the layout and its work list made together,
// A read where its tokens stand and D written where its slots do, by every variant.

#include "fp8/gemm_rig.hpp"

#include "verify/reference/router.hpp"

#include <algorithm>

namespace bellows {
namespace {

using namespace testing;

struct Routing {
    std::uint64_t tokens, top_k, experts;
    std::uint32_t alignment;
    int absent_percent;
};

struct Places {
    bool a_by_slot, d_by_slot;
    bool by_ids = false; ///< no layout is made: d is by slot, and a, if not by token
};

class Fp8BySlots : public Fp8GemmTest {
protected:
    static std::vector<std::int32_t> choose(const Routing& c) {
        auto ids = reference::random_indices(c.tokens * c.top_k, 11, c.experts);
        const auto absent = reference::random_indices(ids.size(), 12, 100);
        for (std::size_t i = 0; i < ids.size(); ++i)
            ids[i] = absent[i] < c.absent_percent ? -1 : ids[i];
        return ids;
    }

    static void check(const Routing& c, const Kind& a_kind, const Kind& b_kind, std::uint64_t n,
                      std::uint64_t k, DType storage, Places places = {true, true},
                      bool nt = true) {
        SCOPED_TRACE(std::string(nt ? "nt " : "nn ") + a_kind.name() + " by " + b_kind.name() +
                     " to " + to_string(storage) + ", N " + std::to_string(n) + ", K " +
                     std::to_string(k) + ", " + std::to_string(c.tokens) + " tokens, top " +
                     std::to_string(c.top_k) + " of " + std::to_string(c.experts) + ", alignment " +
                     std::to_string(c.alignment) + (places.a_by_slot ? ", a by slot" : "") +
                     (places.d_by_slot ? ", d by slot" : "") + (places.by_ids ? ", by ids" : ""));
        const auto ids = choose(c);
        const auto order = reference::make_permutation(ids, c.top_k, c.experts, c.alignment);
        const std::uint64_t slots = ids.size();
        const std::uint64_t capacity = ops::moe_capacity(c.tokens, c.top_k, c.experts, c.alignment);
        const std::uint64_t a_rows = places.a_by_slot ? c.tokens : places.by_ids ? slots : capacity;
        const std::uint64_t d_rows = places.d_by_slot ? slots : capacity;
        const Input a = input(a_kind, {a_rows, k}, 1);
        const Input b = input(b_kind,
                              nt ? std::vector<std::uint64_t>{c.experts, n, k}
                                 : std::vector<std::uint64_t>{c.experts, k, n},
                              2);
        const OpTensor d = padded(storage, {d_rows, n});
        const bool accumulate = storage == DType::F32 && places.d_by_slot;
        const auto before = random(storage, d_rows * n, 3);
        if (accumulate)
            write(d.view, before);

        const OpTensor ids_t = tensor(DType::I32, {c.tokens, c.top_k}, ids);
        const OpTensor counts = result(DType::U32, {c.experts}),
                       offsets = result(DType::U32, {c.experts + 1}),
                       row_to_slot = result(DType::I32, {capacity}),
                       slot_to_row = result(DType::I32, {c.tokens, c.top_k});
        const ops::MoeLayout layout{counts, offsets, row_to_slot, slot_to_row, c.alignment};
        const Buffer more =
            workspace(ops::moe_layout_workspace_bytes(c.tokens, c.top_k, c.experts));
        const Buffer list = workspace(
            fp8::grouped_rows_bytes(device(), GroupLayout::prefix_sums(offsets.view, capacity)));
        GroupedRows unlisted = fp8::unlisted_rows(GroupLayout::by_ids(ids_t, c.experts));
        unlisted.slots_per_a_row = places.a_by_slot ? unlisted.slots_per_a_row : 1;
        const Buffer scratch = workspace(
            places.by_ids ? fp8::gemm_workspace_bytes(device(), *a.operand, *b.operand, unlisted,
                                                      way_.variant)
                          : fp8::gemm_workspace_bytes(device(), *a.operand, *b.operand, capacity));
        run([&](Recording& r) {
            GroupedRows rows = unlisted;
            if (!places.by_ids) {
                rows = fp8::make_grouped_rows(r, ids_t, layout, more.view(), {n, 0, 0, 0},
                                              list.view());
                rows.slots_per_a_row = places.a_by_slot ? static_cast<std::uint32_t>(c.top_k) : 0;
                rows.d_by_slot = places.d_by_slot;
            }
            const auto gemm =
                nt ? fp8::m_grouped_gemm_nt_contiguous : fp8::m_grouped_gemm_nn_contiguous;
            gemm(r, *a.operand, *b.operand, d, rows, accumulate, scratch.view(), way_);
        });

        const auto a_abs = reference::absolute(a.values), b_abs = reference::absolute(b.values);
        std::vector<double> expected(d_rows * n, 0.0), magnitudes(d_rows * n, 0.0);
        std::vector<bool> present(d_rows, false);
        const auto gemm = nt ? reference::gemm_nt : reference::gemm_nn;
        for (std::uint64_t slot = 0; slot < slots; ++slot) {
            if (order.row_of_slot[slot] < 0)
                continue;
            const auto row = static_cast<std::uint64_t>(order.row_of_slot[slot]);
            const std::uint64_t from = places.a_by_slot ? slot / c.top_k
                                       : places.by_ids  ? slot
                                                        : row;
            const std::uint64_t to = places.d_by_slot ? slot : row;
            const auto expert = static_cast<std::uint64_t>(ids[slot]);
            const auto product = [&](const std::vector<double>& x, const std::vector<double>& y) {
                return gemm(reference::View(x).subspan(from * k, k),
                            reference::View(y).subspan(expert * n * k, n * k), 1, n, k);
            };
            const auto at = static_cast<std::ptrdiff_t>(to * n);
            const auto values = product(a.values, b.values), sizes = product(a_abs, b_abs);
            std::copy(values.begin(), values.end(), expected.begin() + at);
            std::copy(sizes.begin(), sizes.end(), magnitudes.begin() + at);
            present[to] = true;
        }
        std::vector<float> actual = read(d.view), others;
        for (std::uint64_t i = 0; i < actual.size(); ++i) {
            if (accumulate) {
                expected[i] += before[i];
                magnitudes[i] += std::abs(before[i]);
            } else if (!present[i / n]) {
                if (places.d_by_slot || i / n >= order.rows())
                    others.push_back(actual[i]);
                actual[i] = 0;
            }
        }
        expect_untouched(others, "slots that are not here");
        expect_untouched(rig().outside(d), "between D's rows");
        expect_product(actual, expected, magnitudes, {d_rows, n}, k, storage);
    }

    /// Those that this device has.
    static std::vector<fp8::Variant> variants() {
        std::vector<fp8::Variant> all{fp8::Variant::Decoded, fp8::Variant::Streamed};
        if (fp8::why_not(device(), fp8::Variant::Packed).empty() &&
            fp8::m_alignment(device()) == 128)
            all.push_back(fp8::Variant::Packed);
        return all;
    }
};

constexpr auto kRoutings = std::to_array<Routing>({
    {9, 2, 3, 1, 0},
    {33, 3, 7, 4, 30},
    {70, 2, 2, 1, 10}, // more rows of a group than a tile has
    {5, 4, 64, 16, 50},
    {3, 2, 4, 1, 100}, // nothing is here
    {1, 1, 1, 1, 0},
});

TEST_F(Fp8BySlots, EveryRouting) {
    for (const Routing& c : kRoutings) {
        check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 40, 136, DType::F32);
        check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 33, 200, DType::BF16);
    }
}

TEST_F(Fp8BySlots, EveryPlace) {
    for (const Places places : {Places{true, false}, {false, true}, {false, false}})
        for (const auto variant : {fp8::Variant::Device, fp8::Variant::Decoded}) {
            way_ = variant;
            check(kRoutings[1], kind(Blocks::Rows128), kind(Blocks::Blocks128), 36, 136, DType::F32,
                  places);
        }
}

TEST_F(Fp8BySlots, EveryKindOfOperand) {
    for (const bool nt : {true, false})
        for (const Kind& a : kinds(false))
            if (!a.recipe || a.recipe->blocks != Blocks::Blocks128)
                check(kRoutings[1], a, kind(Blocks::Blocks128), 33, 136, DType::BF16, {true, true},
                      nt);
    check(kRoutings[1], kBf16Kind, kBf16Kind, 40, 72, DType::F32);
}

TEST_F(Fp8BySlots, EveryVariant) {
    for (const auto variant : variants()) {
        way_ = variant;
        for (const Routing& c : {kRoutings[1], kRoutings[2]}) {
            check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 40, 136, DType::F32);
            check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 33, 200, DType::BF16);
        }
    }
}

TEST_F(Fp8BySlots, StreamedOnMatrixUnits) {
    way_ = fp8::Variant::Streamed;
    for (const bool direct : {false, true})
        if (stream_on_units(direct))
            for (const Routing& c : {kRoutings[1], kRoutings[2]})
                check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 40, 136, DType::F32);
}

constexpr Places kByIds{true, true, true}, kByIdsWithoutTokens{false, true, true};

TEST_F(Fp8BySlots, IdsWithoutALayout) {
    for (const bool on_units : {false, true}) {
        if (on_units && !stream_on_units(true))
            continue;
        for (const Routing& c : kRoutings) {
            check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 40, 136, DType::F32, kByIds);
            check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 33, 200, DType::BF16,
                  kByIdsWithoutTokens);
        }
    }
}

TEST_F(Fp8BySlots, IdsInEveryVariant) {
    for (const auto variant : variants()) {
        way_ = variant;
        for (const Routing& c : {kRoutings[1], kRoutings[3]})
            check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 40, 136, DType::F32, kByIds);
    }
    way_ = fp8::Variant::Device;
    for (const bool nt : {true, false}) {
        check(kRoutings[1], kBf16Kind, kind(Blocks::Blocks128), 40, 136, DType::BF16, kByIds, nt);
        check(kRoutings[1], kBf16Kind, kBf16Kind, 40, 72, DType::F32, kByIds, nt);
    }
}

/// Turns of 64 rows, of which units take eights; K with and without an end of its own.
TEST_F(Fp8BySlots, IdsOnNativeUnits) {
    if (!native())
        return; // fp8_gemm_test checks what is said then
    for (const Routing& c : {kRoutings[0], kRoutings[1], kRoutings[2], kRoutings[3], kRoutings[4],
                             Routing{150, 1, 1, 1, 0}, Routing{200, 2, 3, 1, 5}})
        for (const Places& places : {kByIds, kByIdsWithoutTokens}) {
            check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 40, 136, DType::F32, places);
            check(c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 136, 1300, DType::BF16,
                  places);
        }
}

/// Tokens behind the last that there is are as if they had no ids.
TEST_F(Fp8BySlots, IdsOfTokensThatAreThere) {
    const std::uint64_t tokens = 7, top_k = 3, experts = 2, n = 32, k = 128, there = 4;
    const Input a = input(kind(Blocks::Rows128), {tokens, k}, 1),
                b = input(kind(Blocks::Blocks128), {experts, n, k}, 2);
    const auto ids = reference::random_indices(tokens * top_k, 11, experts);
    const OpTensor ids_t = tensor(DType::I32, {tokens, top_k}, ids),
                   count = tensor(DType::U32, {1}, std::vector<std::uint32_t>{there});
    for (const int units : {0, 1, 2}) {
        if ((units == 1 && !stream_on_units(true)) || (units == 2 && !native()))
            continue;
        const OpTensor d = padded(DType::F32, {tokens * top_k, n});
        const GroupedRows rows = fp8::unlisted_rows(
            GroupLayout::by_ids(ids_t.view.with_row_count(count.view.buffer), experts));
        const Buffer scratch =
            workspace(fp8::gemm_workspace_bytes(device(), *a.operand, *b.operand, rows));
        run([&](Recording& r) {
            fp8::m_grouped_gemm_nt_contiguous(r, *a.operand, *b.operand, d, rows, false,
                                              scratch.view(), way_);
        });
        const auto actual = read(d.view);
        std::vector<double> expected, magnitudes;
        for (std::uint64_t slot = 0; slot < there * top_k; ++slot) {
            const auto add = [&](std::vector<double>& to, const std::vector<double>& x,
                                 const std::vector<double>& y) {
                const auto at = static_cast<std::uint64_t>(ids[slot]) * n * k;
                const auto row = reference::gemm_nt(reference::View(x).subspan(slot / top_k * k, k),
                                                    reference::View(y).subspan(at, n * k), 1, n, k);
                to.insert(to.end(), row.begin(), row.end());
            };
            add(expected, a.values, b.values);
            add(magnitudes, reference::absolute(a.values), reference::absolute(b.values));
        }
        expect_product({actual.begin(), actual.begin() + there * top_k * n}, expected, magnitudes,
                       {there * top_k, n}, k, DType::F32);
        expect_untouched({actual.begin() + there * top_k * n, actual.end()}, "later tokens");
    }
}

TEST_F(Fp8BySlots, RefusesIdsThatDoNotFit) {
    const std::uint64_t tokens = 4, top_k = 2, experts = 3, n = 32, k = 128;
    const Input a = input(kind(Blocks::Rows128), {tokens, k}, 1),
                b = input(kind(Blocks::Blocks128), {experts, n, k}, 2);
    const OpTensor ids = result(DType::I32, {tokens, top_k}),
                   flat = result(DType::I32, {tokens * top_k});
    const OpTensor d = padded(DType::F32, {tokens * top_k, n}),
                   short_d = padded(DType::F32, {tokens, n});
    const auto layout = GroupLayout::by_ids(ids.view, experts);
    const GroupedRows rows = fp8::unlisted_rows(layout);
    const std::uint64_t bytes = fp8::gemm_workspace_bytes(device(), *a.operand, *b.operand, rows);
    const Buffer scratch = workspace(bytes);
    const auto refused = [&](const OpTensor& to, const GroupedRows& r_rows, BufferView memory,
                             const std::vector<std::string>& words) {
        expect_refused(
            [&](Recording& r) {
                fp8::m_grouped_gemm_nt_contiguous(r, *a.operand, *b.operand, to, r_rows, false,
                                                  memory);
            },
            words);
    };
    refused(short_d, rows, scratch.view(), {"8 rows of d", "one for 2", "(ids)"});
    GroupedRows each = rows;
    each.slots_per_a_row = 1;
    refused(d, each, scratch.view(), {"8 rows of d", "one for 1"});
    refused(d, rows, scratch.view().sub(0, 16), {"workspace has 16 bytes"});
    expect_refused([&](Recording&) { GroupLayout::by_ids(flat.view, experts); },
                   {"ids are i32 [8]", "[tokens, top_k]"});
    expect_refused(
        [&](Recording& r) { fp8::make_grouped_rows(r, layout, {n, 0, 0, 0}, scratch.view()); },
        {"rows by ids stand anywhere", "unlisted_rows"});
}

TEST_F(Fp8BySlots, RefusesWhatDoesNotFit) {
    const std::uint64_t tokens = 4, top_k = 2, experts = 3, slots = 8, n = 32, k = 128;
    const Input a = input(kind(Blocks::Rows128), {tokens, k}, 1),
                blocks = input(kind(Blocks::Blocks128), {tokens, k}, 1),
                b = input(kind(Blocks::Blocks128), {experts, n, k}, 2);
    const OpTensor d = padded(DType::F32, {slots, n}), offsets = result(DType::U32, {experts + 1}),
                   places = result(DType::I32, {slots}), few = result(DType::I32, {slots - 1});
    const Buffer scratch =
        workspace(fp8::gemm_workspace_bytes(device(), *a.operand, *b.operand, slots));
    const auto layout = GroupLayout::prefix_sums(offsets.view, slots);
    const Buffer list = workspace(fp8::grouped_rows_bytes(device(), layout));
    Recording other(device(), QueueRole::Compute, "list");
    const GroupedRows made = fp8::make_grouped_rows(other, layout, {n, 0, 0, 0}, list.view());
    const auto refused = [&](const Operand& x, const TensorView& slots_of_rows, std::uint32_t share,
                             const std::vector<std::string>& words, const OpTensor& to,
                             bool accumulate, fp8::Way way) {
        GroupedRows rows = made;
        rows.slots = slots_of_rows;
        rows.slots_per_a_row = share;
        rows.d_by_slot = true;
        expect_refused(
            [&](Recording& r) {
                fp8::m_grouped_gemm_nt_contiguous(r, x, *b.operand, to, rows, accumulate,
                                                  scratch.view(), way);
            },
            words);
    };
    const auto misfits = [&](const Operand& x, const TensorView& slots_of_rows, std::uint32_t share,
                             const std::vector<std::string>& words) {
        refused(x, slots_of_rows, share, words, d, false, {});
    };
    misfits(*a.operand, places, 0, {"the layout was made for 8 rows"});
    misfits(*a.operand, few, top_k, {"slots are", "i32 [8]"});
    misfits(*a.operand, {}, top_k, {"slots are", "i32 [8]"});
    misfits(*blocks.operand, places, top_k, {"scales stand for several rows"});
    refused(*a.operand, places, top_k, {"d is bf16 [8, 32]", "take an f32 d"},
            padded(DType::BF16, {slots, n}), true, fp8::Variant::Decoded);
}

} // namespace
} // namespace bellows
