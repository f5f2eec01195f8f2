// SPDX-License-Identifier: MIT
// Grouped products of fp8 operands in every layout against f64 products of the same dequantised
// operands; rows that belong to no group hold NaN and stay as they are.

#include "fp8/gemm_rig.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bellows {
namespace {

using namespace testing;
using LayoutForm = GroupLayout::Form;

/// Groups of so many rows in a layout.
struct Case {
    LayoutForm form = LayoutForm::PrefixSums;
    std::vector<std::uint32_t> counts;
    std::uint64_t spacing = 0; ///< AlignedEnds, Masked; RowGroups: rows of padding after each group
};

/// The same on host and device.
struct Groups {
    std::vector<std::uint64_t> begins, ends;
    std::uint64_t rows = 0;
    Buffer memory;
    GroupLayout layout;

    std::vector<bool> present() const {
        std::vector<bool> result(rows, false);
        for (std::size_t g = 0; g < begins.size(); ++g)
            std::fill(result.begin() + static_cast<std::ptrdiff_t>(begins[g]),
                      result.begin() + static_cast<std::ptrdiff_t>(ends[g]), true);
        return result;
    }
};

class Fp8GroupedGemm : public Fp8GemmTest {
protected:
    static constexpr std::uint64_t kBehind = 5; ///< rows behind the last group
    inline static bool unlisted_ = false;       ///< products get no work list
    inline static bool contiguous_ = false;     ///< masked layouts go through contiguous ops

    void TearDown() override {
        unlisted_ = contiguous_ = false;
        Fp8GemmTest::TearDown();
    }

    static Groups make_groups(const Case& c) {
        Groups groups;
        std::uint64_t at = 0;
        std::vector<std::int64_t> words;
        for (std::size_t g = 0; g < c.counts.size(); ++g) {
            const std::uint64_t first = c.form == LayoutForm::Masked ? g * c.spacing : at;
            groups.begins.push_back(first);
            groups.ends.push_back(first +
                                  std::min<std::uint64_t>(c.counts[g], c.form == LayoutForm::Masked
                                                                           ? c.spacing
                                                                           : ~std::uint64_t{0}));
            at = groups.ends.back();
            if (c.form == LayoutForm::AlignedEnds)
                at = (at + c.spacing - 1) / c.spacing * c.spacing;
            if (c.form == LayoutForm::RowGroups)
                at += c.spacing;
        }
        const std::uint64_t count = c.counts.size();
        groups.rows = c.form == LayoutForm::Masked ? count * c.spacing : at + kBehind;
        switch (c.form) {
        case LayoutForm::PrefixSums:
            words.assign(groups.begins.begin(), groups.begins.end());
            words.push_back(static_cast<std::int64_t>(groups.ends.back()));
            break;
        case LayoutForm::AlignedEnds:
            words.assign(groups.ends.begin(), groups.ends.end());
            break;
        case LayoutForm::RowGroups:
            words.assign(groups.rows, -1);
            for (std::size_t g = 0; g < count; ++g)
                std::fill(words.begin() + static_cast<std::ptrdiff_t>(groups.begins[g]),
                          words.begin() + static_cast<std::ptrdiff_t>(groups.ends[g]),
                          static_cast<std::int64_t>(g));
            break;
        case LayoutForm::Masked:
            words.assign(c.counts.begin(), c.counts.end());
            break;
        case LayoutForm::Ids: // by_slots_test.cpp
            ADD_FAILURE() << "rows by ids have no begins";
            break;
        }
        const DType dtype = c.form == LayoutForm::PrefixSums ? DType::U32 : DType::I32;
        OpTensor values = tensor(dtype, {words.size()}, words);
        groups.memory = std::move(values.buffer);
        groups.layout = c.form == LayoutForm::PrefixSums
                            ? GroupLayout::prefix_sums(values, groups.rows)
                        : c.form == LayoutForm::AlignedEnds
                            ? GroupLayout::aligned_ends(values, c.spacing, groups.rows)
                        : c.form == LayoutForm::RowGroups ? GroupLayout::row_groups(values, count)
                                                          : GroupLayout::masked(values, c.spacing);
        return groups;
    }

    static Buffer list_for(const Groups& groups) {
        return workspace(fp8::grouped_rows_bytes(device(), groups.layout));
    }

    /// Rows of group g times B[g].
    static std::vector<double> m_product(bool nt, const Groups& groups,
                                         const std::vector<double>& a, const std::vector<double>& b,
                                         std::uint64_t n, std::uint64_t k) {
        std::vector<double> d(groups.rows * n, 0.0);
        for (std::size_t g = 0; g < groups.begins.size(); ++g) {
            const std::uint64_t first = groups.begins[g], rows = groups.ends[g] - first;
            const auto at = reference::View(a).subspan(first * k, rows * k);
            const auto bt = reference::View(b).subspan(g * n * k, n * k);
            const auto part = nt ? reference::gemm_nt(at, bt, rows, n, k)
                                 : reference::gemm_nn(at, bt, rows, n, k);
            std::copy(part.begin(), part.end(), d.begin() + static_cast<std::ptrdiff_t>(first * n));
        }
        return d;
    }

    /// Rows of groups must match, the others be as they were: zero in `expected`.
    static void expect_rows(const OpTensor& d, const Groups& groups, std::vector<double> expected,
                            const std::vector<double>& magnitudes, std::uint64_t n,
                            std::uint64_t k) {
        std::vector<float> actual = read(d.view), padding;
        const std::vector<bool> present = groups.present();
        for (std::uint64_t row = 0; row < groups.rows; ++row)
            for (std::uint64_t i = row * n; i < (row + 1) * n && !present[row]; ++i) {
                padding.push_back(actual[i]);
                actual[i] = 0;
            }
        expect_untouched(padding, "rows of no group");
        expect_untouched(rig().outside(d), "between D's rows");
        expect_product(actual, expected, magnitudes, {groups.rows, n}, k, d.view.dtype);
    }

    /// m_grouped_gemm_nt or nn; masked layouts by the masked op.
    static void check_m(bool nt, const Case& c, const Kind& a_kind, const Kind& b_kind,
                        std::uint64_t n, std::uint64_t k, DType storage, bool accumulate = false) {
        SCOPED_TRACE(std::string(nt ? "nt " : "nn ") + a_kind.name() + " by " + b_kind.name() +
                     ", N " + std::to_string(n) + ", K " + std::to_string(k) + " to " +
                     to_string(storage));
        const Groups groups = make_groups(c);
        SCOPED_TRACE(describe(groups.layout));
        const std::uint64_t count = c.counts.size();
        const bool masked = c.form == LayoutForm::Masked && !contiguous_;
        const auto rows_by = [&](std::uint64_t columns) {
            return masked ? std::vector<std::uint64_t>{count, c.spacing, columns}
                          : std::vector<std::uint64_t>{groups.rows, columns};
        };
        const Input a = input(a_kind, rows_by(k), n + 1, {}, groups.present());
        const Input b = nt ? input(b_kind, {count, n, k}, 2) : input(b_kind, {count, k, n}, 2);
        const OpTensor d = padded(storage, rows_by(n));
        const auto before = random(storage, groups.rows * n, 3);
        std::vector<bool> present = groups.present();
        if (accumulate) {
            std::vector<float> start = before;
            for (std::uint64_t i = 0; i < start.size(); ++i)
                if (!present[i / n])
                    start[i] = std::bit_cast<float>(checks::kUntouched);
            write(d.view, start);
        }
        const GroupedRows unlisted = fp8::unlisted_rows(groups.layout);
        const Buffer list = list_for(groups),
                     scratch = unlisted_ ? workspace(fp8::gemm_workspace_bytes(
                                               device(), *a.operand, *b.operand, unlisted))
                                         : workspace_for(*a.operand, *b.operand);
        run([&](Recording& r) {
            const GroupedRows rows =
                unlisted_ ? unlisted
                          : fp8::make_grouped_rows(r, groups.layout, {n, 0, 0, 0}, list.view());
            const auto gemm = masked ? fp8::m_grouped_gemm_nt_masked
                              : nt   ? fp8::m_grouped_gemm_nt_contiguous
                                     : fp8::m_grouped_gemm_nn_contiguous;
            gemm(r, *a.operand, *b.operand, d, rows, accumulate, scratch.view(), way_);
        });
        auto expected = m_product(nt, groups, a.values, b.values, n, k);
        auto magnitudes = m_product(nt, groups, reference::absolute(a.values),
                                    reference::absolute(b.values), n, k);
        for (std::uint64_t i = 0; i < before.size() && accumulate; ++i)
            if (present[i / n]) {
                expected[i] += before[i];
                magnitudes[i] += std::abs(before[i]);
            }
        expect_rows(d, groups, expected, magnitudes, n, k);
    }

    static Input k_input(const Kind& kind, const Groups& groups, std::uint64_t columns,
                         std::uint64_t seed) {
        const bool offsets = kind.recipe && kind.recipe->blocks == Blocks::Columns128;
        return input(kind, {groups.rows, columns}, seed,
                     offsets ? groups.layout.values : TensorView{}, groups.present());
    }

    static std::vector<double> k_product(const Groups& groups, const std::vector<double>& a,
                                         const std::vector<double>& b, std::uint64_t m,
                                         std::uint64_t n) {
        std::vector<double> d;
        for (std::size_t g = 0; g < groups.begins.size(); ++g) {
            const std::uint64_t first = groups.begins[g], rows = groups.ends[g] - first;
            const auto part =
                reference::gemm_tn(reference::View(a).subspan(first * m, rows * m),
                                   reference::View(b).subspan(first * n, rows * n), m, n, rows);
            d.insert(d.end(), part.begin(), part.end());
        }
        return d;
    }

    static void check_k(const Case& c, const Kind& a_kind, const Kind& b_kind, std::uint64_t m,
                        std::uint64_t n, bool accumulate) {
        SCOPED_TRACE(a_kind.name() + " by " + b_kind.name() + ", M " + std::to_string(m) + ", N " +
                     std::to_string(n) + (accumulate ? ", added" : ""));
        const Groups groups = make_groups(c);
        SCOPED_TRACE(describe(groups.layout));
        const std::uint64_t count = c.counts.size();
        const Input a = k_input(a_kind, groups, m, 1), b = k_input(b_kind, groups, n, 2);
        const OpTensor d = padded(DType::F32, {count, m, n});
        const auto before = random(DType::F32, count * m * n, 3);
        if (accumulate)
            write(d.view, before);
        const Buffer list = list_for(groups), scratch = workspace_for(*a.operand, *b.operand);
        run([&](Recording& r) {
            const GroupedRows rows = fp8::make_grouped_rows(r, groups.layout, {}, list.view());
            fp8::k_grouped_gemm_tn(r, *a.operand, *b.operand, d, rows, accumulate, scratch.view(),
                                   way_);
        });
        auto expected = k_product(groups, a.values, b.values, m, n);
        auto magnitudes =
            k_product(groups, reference::absolute(a.values), reference::absolute(b.values), m, n);
        if (accumulate) {
            reference::accumulate(expected, reference::to_double(before));
            reference::accumulate(magnitudes, reference::absolute(reference::to_double(before)));
        }
        expect_product(read(d.view), expected, magnitudes, {count, m, n}, groups.rows, DType::F32);
        expect_untouched(rig().outside(d), "between D's rows");
    }
};

const std::vector<std::uint32_t> kMixed = {5, 0, 33, 1, 130, 0, 17};

/// Every layout of the same groups, and what can happen to groups.
std::vector<Case> layouts() {
    return {{LayoutForm::PrefixSums, kMixed},
            {LayoutForm::AlignedEnds, kMixed, 128},
            {LayoutForm::AlignedEnds, kMixed, 12},
            {LayoutForm::RowGroups, kMixed, 0},
            {LayoutForm::RowGroups, kMixed, 3},
            {LayoutForm::Masked, kMixed, 140},
            {LayoutForm::Masked, {200, 0, 24, 1}, 24}, // one count too large
            {LayoutForm::PrefixSums, {1}},
            {LayoutForm::PrefixSums, {0, 0, 0}},
            {LayoutForm::PrefixSums, {0, 70, 0}}, // all rows in one group
            {LayoutForm::RowGroups, {0, 0}, 0},
            {LayoutForm::AlignedEnds, {0, 3, 0, 0, 9}, 16},
            {LayoutForm::Masked, {1, 1, 0}, 1}};
}

TEST_F(Fp8GroupedGemm, EveryLayout) {
    for (const Case& c : layouts()) {
        check_m(true, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 36, 200, DType::BF16);
        check_m(true, c, kBf16Kind, kBf16Kind, 40, 72, DType::F32);
        if (c.form != LayoutForm::Masked)
            check_m(false, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 200, 136,
                    DType::BF16);
    }
}

TEST_F(Fp8GroupedGemm, EveryLayoutWithoutAWorkList) {
    unlisted_ = true;
    for (const auto variant : {fp8::Variant::Device, fp8::Variant::Decoded})
        for (const Case& c : layouts()) {
            way_ = variant;
            check_m(true, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 40, 136, DType::F32);
            if (c.form != LayoutForm::Masked)
                check_m(false, c, kBf16Kind, kind(Blocks::Blocks128), 40, 136, DType::BF16);
        }
}

TEST_F(Fp8GroupedGemm, EveryPairOfOperands) {
    const Case c{LayoutForm::AlignedEnds, {20, 0, 7}, 16};
    for (const bool nt : {true, false}) {
        std::size_t n = 0;
        for (const Kind& a : kinds(false))
            for (const Kind& b : kinds(!nt))
                check_m(nt, c, a, b, 40, 136, n++ % 2 == 0 ? DType::F32 : DType::BF16);
    }
    const Case masked{LayoutForm::Masked, {3, 0, 9}, 10};
    for (const Kind& a : kinds(false))
        if (!a.recipe || a.recipe->blocks != Blocks::Blocks128)
            check_m(true, masked, a, kind(Blocks::Blocks128), 40, 136, DType::BF16);
    check_m(true, {LayoutForm::Masked, {3, 0, 9}, 128}, kind(Blocks::Blocks128), kBf16Kind, 40, 136,
            DType::BF16);
}

TEST_F(Fp8GroupedGemm, EverySize) {
    const Case c{LayoutForm::RowGroups, {3, 0, 18}, 2};
    for (const std::uint64_t k : {1u, 127u, 128u, 129u, 200u})
        for (const std::uint64_t n : {1u, 31u, 129u})
            for (const bool nt : {true, false})
                check_m(nt, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), n, k,
                        n == 31 ? DType::BF16 : DType::F32);
}

TEST_F(Fp8GroupedGemm, AddsToD) {
    for (const bool nt : {true, false})
        check_m(nt, {LayoutForm::RowGroups, {3, 0, 18}, 2}, kind(Blocks::Rows128),
                kind(Blocks::Blocks128), 40, 136, DType::F32, true);
    check_m(true, {LayoutForm::Masked, {3, 0, 18}, 20}, kind(Blocks::Rows128),
            kind(Blocks::Blocks128), 40, 136, DType::F32, true);
}

TEST_F(Fp8GroupedGemm, WeightGradients) {
    const std::vector<std::vector<std::uint32_t>> groups = {
        kMixed, {1}, {0, 0}, {127, 128, 129}, {0, 200, 0}};
    for (const auto& counts : groups)
        for (const auto& [m, n] :
             {std::pair<std::uint64_t, std::uint64_t>{40, 72}, {33, 17}, {1, 130}})
            for (const bool accumulate : {false, true})
                check_k({LayoutForm::PrefixSums, counts}, kind(Blocks::Columns128),
                        kind(Blocks::Columns128), m, n, accumulate);
}

TEST_F(Fp8GroupedGemm, WeightGradientsOfEveryPairOfOperands) {
    for (const Kind& a : kinds(true))
        for (const Kind& b : kinds(true))
            check_k({LayoutForm::PrefixSums, {20, 0, 135}}, a, b, 40, 136, true);
    for (const Case& c : layouts())
        check_k(c, kBf16Kind, kind(Blocks::PerTensor), 24, 40, false);
}

TEST_F(Fp8GroupedGemm, PackedOperandsOnMatrixUnits) {
    if (!fp8::why_not(device(), fp8::Variant::Packed).empty())
        return; // fp8_gemm_test checks what is said then
    way_ = fp8::Variant::Packed;
    const bool cpu = device().info().is_cpu; // whose compiler takes half a minute for a kernel
    const std::vector<std::vector<std::uint32_t>> groups =
        cpu ? std::vector<std::vector<std::uint32_t>>{{5, 0, 130}}
            : std::vector<std::vector<std::uint32_t>>{
                  kMixed, {1}, {0, 0}, {127, 128, 129}, {0, 300, 0}};
    const std::vector<std::pair<std::uint64_t, std::uint64_t>> sizes = {
        {33, 17}, {40, 72}, {1, 130}};
    for (const auto& counts : groups)
        for (const auto& [m, n] : sizes)
            for (const bool accumulate : {false, true})
                if (!cpu || n % 2 == 1)
                    check_k({LayoutForm::PrefixSums, counts}, kind(Blocks::Columns128),
                            kind(Blocks::Columns128), m, n, accumulate);
    unlisted_ = true; // a layout that packed products read themselves
    if (cpu)          // the smallest tile
        way_.tile = {
            .fragments_m = 1, .fragments_n = 1, .warps_n = 128 / device().info().subgroup_size};
    check_m(true, {LayoutForm::Masked, {5, 0, 130}, 140}, kind(Blocks::Rows128),
            kind(Blocks::Blocks128), 33, 200, DType::F32, true);
    for (const Case& c : cpu ? std::vector<Case>{} : layouts())
        if (c.form == LayoutForm::Masked)
            check_m(true, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 130, 136, DType::BF16);
    contiguous_ = true; // groups may share scales of 128 rows: then a list is needed
    const auto with_shared_scales = [](std::uint64_t spacing) {
        check_m(true, {LayoutForm::Masked, {20, 0, 7}, spacing}, kind(Blocks::Blocks128),
                kind(Blocks::Blocks128), 33, 200, DType::F32, true);
    };
    with_shared_scales(128);
    if (fp8::m_alignment(device()) != 128) { // a CPU's work lists have smaller tiles
        try {
            with_shared_scales(140);
            ADD_FAILURE() << "not refused";
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("work lists"), std::string::npos)
                << error.what();
        }
        return;
    }
    with_shared_scales(140);
    contiguous_ = false;
    // Of two tiles a group, and of so many that a list pays.
    for (const std::uint64_t spacing : {256u, 1280u})
        check_m(true, {LayoutForm::Masked, {150, 0, 3, 256}, spacing}, kind(Blocks::Blocks128),
                kind(Blocks::Blocks128), 40, 136, DType::F32);
    unlisted_ = false;
    for (const Case& c : layouts())
        for (const bool nt : {true, false}) {
            if (c.form == LayoutForm::Masked && !nt)
                continue;
            check_m(nt, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 36, 200, DType::BF16);
            check_m(nt, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 130, 136, DType::F32);
        }
    check_m(true, {LayoutForm::RowGroups, {3, 0, 318}, 2}, kind(Blocks::Rows128),
            kind(Blocks::Rows128), 40, 136, DType::F32, true);
}

TEST_F(Fp8GroupedGemm, NativeUnits) {
    if (!native())
        return; // fp8_gemm_test checks what is said then
    for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32}) {
        const auto of = [&](Blocks blocks) { return kind(blocks, Format::E4M3, rule); };
        for (const Case& c : layouts())
            for (const bool nt : {true, false}) {
                if (c.form == LayoutForm::Masked && !nt)
                    continue;
                check_m(nt, c, of(Blocks::Rows128), of(Blocks::Blocks128), 40, 200, DType::BF16);
                check_m(nt, c, of(Blocks::Rows128), of(Blocks::Blocks128), 136, 136, DType::F32,
                        true);
            }
        for (const auto& counts : std::vector<std::vector<std::uint32_t>>{
                 kMixed, {1}, {0, 0}, {127, 128, 129}, {0, 300, 0}})
            for (const auto& [m, n] :
                 {std::pair<std::uint64_t, std::uint64_t>{40, 72}, {33, 16}, {1, 136}, {260, 8}})
                for (const bool accumulate : {false, true})
                    check_k({LayoutForm::PrefixSums, counts}, of(Blocks::Columns128),
                            of(Blocks::Columns128), m, n, accumulate);
    }
}

TEST_F(Fp8GroupedGemm, StreamedWeights) {
    way_ = fp8::Variant::Streamed;
    for (const Case& c : layouts()) {
        check_m(true, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 36, 200, DType::BF16);
        check_m(true, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 130, 136, DType::F32,
                true);
    }
    for (const Case& c :
         {Case{LayoutForm::RowGroups, {3, 0, 18}, 2}, Case{LayoutForm::Masked, {3, 0, 18}, 20}})
        for (const Kind& a : {kBf16Kind, kF32Kind})
            if (streams(a, kind(Blocks::Blocks128)))
                check_m(true, c, a, kind(Blocks::Blocks128), 40, 137, DType::BF16);
}

TEST_F(Fp8GroupedGemm, StreamedWeightsOnMatrixUnits) {
    way_ = fp8::Variant::Streamed;
    for (const bool direct : {false, true}) {
        if (!stream_on_units(direct))
            continue;
        unlisted_ = direct;
        for (const Case& c : layouts()) {
            check_m(true, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 36, 200, DType::F32);
            if (!device().info().is_cpu)
                check_m(true, c, kind(Blocks::Rows128), kind(Blocks::Blocks128), 130, 136,
                        DType::BF16);
        }
    }
}

TEST_F(Fp8GroupedGemm, DirectProducts) {
    for (const fp8::Way& way : direct_on_units()) {
        way_ = way;
        for (const Case& c : layouts()) {
            unlisted_ = c.counts.size() == 3;
            check_m(true, c, kBf16Kind, kBf16Kind, 40, 72, DType::F32, true);
            if (!device().info().is_cpu) // whose compiler takes half a minute for a kernel
                check_m(true, c, kBf16Kind, kBf16Kind, 130, 128, DType::BF16);
        }
    }
}

TEST_F(Fp8GroupedGemm, GivesTheSameBitsAgain) {
    const Groups groups = make_groups({LayoutForm::PrefixSums, kMixed});
    const std::uint64_t n = 72, k = 264, count = kMixed.size();
    const Input a = input(kind(Blocks::Rows128), {groups.rows, k}, 1, {}, groups.present());
    const Input b = input(kind(Blocks::Blocks128), {count, n, k}, 2);
    const Input dy = k_input(kind(Blocks::Columns128), groups, n, 3),
                x = k_input(kind(Blocks::Columns128), groups, k, 4);
    const OpTensor d = padded(DType::F32, {groups.rows, n}), dw = padded(DType::F32, {count, n, k});
    const Buffer list = list_for(groups), scratch = workspace_for(*a.operand, *b.operand),
                 k_scratch = workspace_for(*dy.operand, *x.operand);
    std::vector<std::uint32_t> first;
    for (int repetition = 0; repetition < 5; ++repetition) {
        run([&](Recording& r) {
            const auto rows = fp8::make_grouped_rows(r, groups.layout, {n, 0, 0, 0}, list.view());
            fp8::m_grouped_gemm_nt_contiguous(r, *a.operand, *b.operand, d, rows, false,
                                              scratch.view());
            fp8::k_grouped_gemm_tn(r, *dy.operand, *x.operand, dw, rows, false, k_scratch.view());
        });
        auto bits = read_back<std::uint32_t>(device(), d.buffer.view());
        const auto more = read_back<std::uint32_t>(device(), dw.buffer.view());
        bits.insert(bits.end(), more.begin(), more.end());
        if (repetition == 0)
            first = bits;
        EXPECT_EQ(bits, first);
    }
}

TEST_F(Fp8GroupedGemm, ANaNStaysInItsGroup) {
    const Groups groups = make_groups({LayoutForm::PrefixSums, {9, 20}});
    const std::uint64_t n = 40, k = 136;
    auto x = random(DType::F32, groups.rows * k, 1), w = random(DType::F32, 2 * n * k, 2);
    x[3 * k + 7] = std::numeric_limits<float>::quiet_NaN();
    w[n * k + 1] = std::numeric_limits<float>::quiet_NaN();
    const Input a = input(kind(Blocks::Rows128), {groups.rows, k}, x);
    const Input b = input(kind(Blocks::Blocks128), {2, n, k}, w);
    const OpTensor d = padded(DType::F32, {groups.rows, n});
    const Buffer list = list_for(groups), scratch = workspace_for(*a.operand, *b.operand);
    run([&](Recording& r) {
        const auto rows = fp8::make_grouped_rows(r, groups.layout, {n, 0, 0, 0}, list.view());
        fp8::m_grouped_gemm_nt_contiguous(r, *a.operand, *b.operand, d, rows, false,
                                          scratch.view());
    });
    const auto values = read(d.view);
    for (std::uint64_t row = 0; row < 29; ++row)
        for (std::uint64_t i = row * n; i < (row + 1) * n; ++i)
            ASSERT_EQ(std::isnan(values[i]), row == 3 || row >= 9) << row << ", " << i % n;
}

TEST_F(Fp8GroupedGemm, SaysWhatDoesNotFit) {
    const Groups groups = make_groups({LayoutForm::PrefixSums, {9, 20}});
    const std::uint64_t n = 40, k = 136;
    const Input a = input(kind(Blocks::Rows128), {groups.rows, k}, 1);
    const Input b = input(kind(Blocks::Blocks128), {2, n, k}, 2);
    const Input three = input(kind(Blocks::Blocks128), {3, n, k}, 2);
    const OpTensor d = padded(DType::BF16, {groups.rows, n});
    const OpTensor dw = padded(DType::F32, {2, k, k});
    const Buffer list = list_for(groups), scratch = workspace(1 << 20);
    Recording made(device(), QueueRole::Compute, "list");
    const auto rows = fp8::make_grouped_rows(made, groups.layout, {n, 0, 0, 0}, list.view());
    const auto refused = [&](auto op, const Operand& x, const Operand& y, const TensorView& z,
                             const std::vector<std::string>& words) {
        expect_refused(
            [&](Recording& r) {
                op(r, x, y, z, rows, false, scratch.view(), fp8::Variant::Device);
            },
            words);
    };
    const auto nt = fp8::m_grouped_gemm_nt_contiguous;
    refused(nt, *a.operand, *three.operand, d,
            {"m_grouped_gemm_nt_contiguous", "2 groups", "[3, 40, 136]", "prefix sums"});
    const Input longer = input(kind(Blocks::Rows128), {groups.rows + 1, k}, 1);
    refused(nt, *longer.operand, *b.operand, padded(DType::BF16, {groups.rows + 1, n}).view,
            {"made for 34 rows", "[35, 136]"});
    refused(nt, *a.operand, *a.operand, d, {"wanted are 2, 3 and 2 dimensions"});
    refused(fp8::m_grouped_gemm_nt_masked,
            input(kind(Blocks::Rows128), {2, 17, k}, 1).operand.value(), *b.operand,
            padded(DType::BF16, {2, 17, n}).view, {"masked layout", "[2, 17, 136]"});
    // A wrong recipe, groups that begin in the middle of a block, a result that is not f32.
    const auto tn = fp8::k_grouped_gemm_tn;
    refused(tn, *a.operand, *a.operand, dw, {"a is e4m3 1x128", "requantize"});
    const Input straddling = input(kind(Blocks::Columns128), {groups.rows, k}, 1);
    refused(tn, *straddling.operand, *straddling.operand, dw,
            {"without group_offsets", "begin anew at each group's first row"});
    const Groups others = make_groups({LayoutForm::PrefixSums, {20, 9}});
    const Input of_others = k_input(kind(Blocks::Columns128), others, k, 1);
    refused(tn, *of_others.operand, *of_others.operand, dw,
            {"not the prefix sums of the layout", "straddle"});
    const Input plain = input(kF32Kind, {groups.rows, k}, 1);
    refused(tn, *plain.operand, *plain.operand, padded(DType::BF16, {2, k, k}).view,
            {"d is bf16", "wanted is f32"});
    refused(tn, *plain.operand, *plain.operand, padded(DType::F32, {3, k, k}).view, {"2 groups"});
    EXPECT_THROW(GroupLayout::prefix_sums(plain.operand->values, 5), Error);
    EXPECT_THROW(GroupLayout::row_groups(groups.layout.values, 2), Error); // u32
    EXPECT_THROW(GroupLayout::aligned_ends(groups.layout.values, 0, 5), Error);
    expect_refused(
        [&](Recording& r) {
            fp8::make_grouped_rows(r, groups.layout, {n, 0, 0, 0}, list.view().sub(0, 16));
        },
        {"workspace has 16 bytes"});
}

TEST_F(Fp8GroupedGemm, TilesBeginWhereTheAlignmentSays) {
    EXPECT_EQ(fp8::m_alignment(device()), group_tile_rows(device().info()));
}

} // namespace
} // namespace bellows
