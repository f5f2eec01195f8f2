// SPDX-License-Identifier: MIT
// Dense products of fp8 operands as the device does them by itself, and what they refuse.

#include "fp8/dense_rig.hpp"

#include <limits>
#include <numbers>

namespace bellows {
namespace {

using namespace testing;

class Fp8Gemm : public Fp8DenseTest {};

TEST_F(Fp8Gemm, EveryPairOfOperands) {
    const Shape s{33, 40, 200};
    for (const GemmForm form : kForms) {
        std::vector<Input> as, bs;
        const auto a_kinds = kinds(form == GemmForm::TN), b_kinds = kinds(form != GemmForm::NT);
        for (const Kind& kind : a_kinds)
            as.push_back(make_a(form, kind, s));
        for (const Kind& kind : b_kinds)
            bs.push_back(make_b(form, kind, s));
        for (std::size_t i = 0; i < as.size(); ++i)
            for (std::size_t j = 0; j < bs.size(); ++j) {
                SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + " " +
                             a_kinds[i].name() + " by " + b_kinds[j].name());
                check(form, as[i], bs[j], s, (i + j) % 2 == 0 ? DType::F32 : DType::BF16);
            }
    }
}

TEST_F(Fp8Gemm, EverySize) {
    for (const GemmForm form : kForms)
        for (const std::uint64_t k : {0u, 1u, 127u, 128u, 129u, 200u})
            for (const auto& [m, n] :
                 {std::pair<std::uint64_t, std::uint64_t>{1, 1}, {1, 34}, {17, 2}, {130, 129}})
                for (const DType storage : {DType::F32, DType::BF16}) {
                    const Shape s{m, n, k};
                    SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + " " +
                                 std::to_string(m) + " x " + std::to_string(n) + " x " +
                                 std::to_string(k) + " to " + to_string(storage));
                    check(form, make_a(form, kinds(form == GemmForm::TN)[0], s),
                          make_b(form, kind(Blocks::Blocks128), s), s, storage);
                }
}

TEST_F(Fp8Gemm, Batches) {
    const Shape s{9, 136, 130, 3};
    for (const GemmForm form : kForms) {
        SCOPED_TRACE(kFormNames[static_cast<int>(form)]);
        check(form, make_a(form, kinds(form == GemmForm::TN)[0], s),
              make_b(form, kind(Blocks::Blocks128), s), s, DType::F32);
    }
}

TEST_F(Fp8Gemm, AddsToD) {
    for (const GemmForm form : kForms)
        for (const std::uint64_t k : {0u, 129u}) {
            const Shape s{20, 33, k};
            SCOPED_TRACE(kFormNames[static_cast<int>(form)]);
            const Input a = make_a(form, kinds(form == GemmForm::TN)[0], s);
            for (const DType storage : {DType::F32, DType::BF16}) {
                check(form, a, make_b(form, kBf16Kind, s), s, storage, true);
                check(form, a, make_b(form, kind(Blocks::Blocks128), s), s, storage, true);
                check(form, a,
                      make_b(form, kind(Blocks::Blocks128, Format::E4M3, ScaleRule::F32), s), s,
                      storage, true);
            }
        }
}

TEST_F(Fp8Gemm, GivesTheSameBitsAgain) {
    const Shape s{70, 72, 264};
    for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32}) {
        const Input a = make_a(GemmForm::NT, kind(Blocks::Rows128, Format::E4M3, rule), s);
        const Input b = make_b(GemmForm::NT, kind(Blocks::Blocks128, Format::E4M3, rule), s);
        const OpTensor d = padded(DType::F32, {s.m, s.n});
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        std::vector<float> first;
        for (int repetition = 0; repetition < 5; ++repetition) {
            run([&](Recording& r) { record(r, GemmForm::NT, a, b, d, false, scratch); });
            const auto values = read(d.view);
            if (repetition == 0)
                first = values;
            EXPECT_EQ(values, first);
        }
    }
}

/// DeepGEMM's own test: normal operands, the product of what they were before quantisation.
TEST_F(Fp8Gemm, NormalOperandsPassDeepGemmsGate) {
    const Shape s{64, 128, 512};
    const auto normal = [](std::uint64_t count, std::uint64_t seed) {
        reference::Random source(seed);
        std::vector<float> values(count);
        for (float& value : values)
            value = reference::round_to_bf16(
                static_cast<float>(std::sqrt(-2 * std::log(1 - source.unit())) *
                                   std::cos(2 * std::numbers::pi * source.unit())));
        return values;
    };
    const auto x = normal(s.m * s.k, 1), w = normal(s.n * s.k, 2);
    for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32}) {
        const Input a = input(kind(Blocks::Rows128, Format::E4M3, rule), {s.m, s.k}, x);
        const Input b = input(kind(Blocks::Blocks128, Format::E4M3, rule), {s.n, s.k}, w);
        const OpTensor d = padded(DType::BF16, {s.m, s.n});
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        run([&](Recording& r) { record(r, GemmForm::NT, a, b, d, false, scratch); });
        EXPECT_LT(reference::calc_diff(read(d.view), product(GemmForm::NT, reference::to_double(x),
                                                             reference::to_double(w), s)),
                  1e-3);
    }
}

TEST_F(Fp8Gemm, ANaNMeetsItsRowsAndColumnsAlone) {
    const Shape s{20, 264, 200};
    const float nan = std::numeric_limits<float>::quiet_NaN();
    auto x = random(DType::F32, s.m * s.k, 1), w = random(DType::F32, s.n * s.k, 2);
    x[7 * s.k + 150] = nan;
    w[130 * s.k + 5] = nan; // its block has rows 128 .. 255 of B
    const float infinity = std::numeric_limits<float>::infinity();
    x[9 * s.k] = infinity; // counts as the largest value: finite
    const Input a = input(kind(Blocks::Rows128), {s.m, s.k}, x);
    const Input b = input(kind(Blocks::Blocks128), {s.n, s.k}, w);
    const OpTensor d = padded(DType::F32, {s.m, s.n});
    const Buffer scratch = workspace_for(*a.operand, *b.operand);
    run([&](Recording& r) { record(r, GemmForm::NT, a, b, d, false, scratch); });
    expect_nans(read(d.view), s.n, [](auto m, auto n) { return m == 7 || (n >= 128 && n < 256); });
}

TEST_F(Fp8Gemm, NativeUnits) {
    const Shape small{9, 40, 136};
    const Input a = make_a(GemmForm::NT, kind(Blocks::Rows128), small);
    const Input b = make_b(GemmForm::NT, kind(Blocks::Blocks128), small);
    const bool there = native();
    const OpTensor narrow = padded(DType::F32, {small.m, small.n - 1});
    const Buffer scratch = workspace_for(*a.operand, *b.operand);
    const auto refused = [&](const Operand& y, const TensorView& d, const std::string& why) {
        expect_refused(
            [&](Recording& r) { fp8::gemm_nt(r, *a.operand, y, d, false, scratch.view(), way_); },
            {"the native variant does not serve", why});
    };
    const Input bf16 = make_b(GemmForm::NT, kBf16Kind, small);
    refused(*bf16.operand, padded(DType::F32, {small.m, small.n}).view, "128x128");
    const Input fewer = make_b(GemmForm::NT, kind(Blocks::Blocks128), {9, 39, 136});
    refused(*fewer.operand, narrow, "multiples of 8");
    if (!there) {
        refused(*b.operand, padded(DType::F32, {small.m, small.n}).view,
                fp8::why_not(device(), fp8::Variant::Native));
        return;
    }
    for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32})
        for (const GemmForm form : kForms)
            for (const Shape& s : {Shape{1, 8, 1},
                                   {9, 40, 127},
                                   {130, 136, 128},
                                   {257, 264, 129},
                                   {300, 8, 1000},
                                   {24, 72, 2000},
                                   {530, 40, 136},
                                   {128, 128, 300, 3}}) {
                if (form == GemmForm::TN && s.batch != 0)
                    continue;
                SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + " " +
                             std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                             std::to_string(s.k));
                const bool tn = form == GemmForm::TN;
                const auto of = [&](Blocks blocks) { return kind(blocks, Format::E4M3, rule); };
                const Input x = make_a(form, of(tn ? Blocks::Columns128 : Blocks::Rows128), s);
                Input y = make_b(form, of(tn ? Blocks::Columns128 : Blocks::Blocks128), s);
                for (const DType storage : {DType::F32, DType::BF16})
                    for (const bool accumulate : {false, true})
                        check(form, x, y, s, storage, accumulate);
                if (form != GemmForm::NN)
                    continue;
                const Quantized codes = *y.operand->quantized;
                y.buffers.push_back(
                    workspace(fp8::prepacked_bytes(device(), codes, form, fp8::Variant::Native)));
                run([&](Recording& r) {
                    y.operand =
                        fp8::prepack(r, codes, form, y.buffers.back().view(), fp8::Variant::Native);
                });
                const std::vector<std::uint8_t> nans(codes.codes.buffer.bytes, fp8::kNanCode);
                device().upload(codes.codes.buffer, std::span<const std::uint8_t>(nans));
                check(form, x, y, s, DType::F32);
            }
}

/// A product of few rows has another kernel, whose bits are those of the tiles of many.
TEST_F(Fp8Gemm, BitsOnNativeUnitsDoNotDependOnTheNumberOfRows) {
    if (!native())
        return;
    const std::uint64_t most = 600, n = 200, k = 1296; // rows without padding
    const Input b = make_b(GemmForm::NT, kind(Blocks::Blocks128), {most, n, k});
    const Input all = make_a(GemmForm::NT, kind(Blocks::Rows128), {most, n, k});
    const auto product = [&](std::uint64_t first, std::uint64_t rows) {
        Quantized q = *all.operand->quantized;
        q.codes = q.codes.rows(first, rows);
        q.scales = q.scales.rows(first, rows);
        const OpTensor d = padded(DType::F32, {rows, n});
        const Buffer scratch = workspace_for(q, *b.operand);
        run([&](Recording& r) { fp8::gemm_nt(r, q, *b.operand, d, false, scratch.view(), way_); });
        return read(d.view);
    };
    const std::vector<float> expected = product(0, most);
    for (const std::uint64_t rows : {1, 8, 9, 17, 30, 47, 64, 65, 130})
        EXPECT_EQ(product(5, rows),
                  std::vector<float>(expected.begin() + 5 * n, expected.begin() + (5 + rows) * n))
            << rows << " rows";
}

TEST_F(Fp8Gemm, VariantsHaveNames) {
    EXPECT_EQ(fp8::variant_of("device"), fp8::Variant::Device);
    for (const fp8::Variant variant : fp8::kVariants)
        EXPECT_EQ(fp8::variant_of(to_string(variant)), variant);
    EXPECT_EQ(fp8::variant_of("folded"), std::nullopt);
}

TEST_F(Fp8Gemm, SaysWhatDoesNotFit) {
    const Shape s{16, 24, 200};
    const Input a = make_a(GemmForm::NT, kind(Blocks::Rows128), s);
    const Input b = make_b(GemmForm::NT, kind(Blocks::Blocks128), s);
    const OpTensor d = padded(DType::BF16, {s.m, s.n});
    const Buffer scratch = workspace_for(*a.operand, *b.operand);
    const auto refused = [&](const Operand& x, const Operand& y, const TensorView& z,
                             const std::vector<std::string>& words) {
        expect_refused([&](Recording& r) { fp8::gemm_nt(r, x, y, z, false, scratch.view()); },
                       words);
    };
    const Input columns = input(kind(Blocks::Columns128), {s.m, s.k}, 1);
    refused(*columns.operand, *b.operand, d,
            {"fp8::gemm_nt", "a is e4m3 128x1", "[16, 200]", "1x128 or 128x128"});
    const Input longer = input(kind(Blocks::Blocks128), {s.n, s.k + 1}, 1);
    refused(*a.operand, *longer.operand, d,
            {"K differs", "e4m3 1x128, power-of-two scales [16, 200]", "[24, 201]"});
    refused(*a.operand, *b.operand, padded(DType::F32, {s.m, s.n + 1}).view,
            {"d must be 16 x 24", "f32 [16, 25]"});
    refused(*a.operand, *b.operand, padded(DType::U32, {s.m, s.n}).view, {"f32 or bf16"});
    const Input cube = input(kind(Blocks::Blocks128), {2, s.n, s.k}, 1);
    refused(*a.operand, *cube.operand, d, {"wanted are 2, 2 and 2 dimensions", "[2, 24, 200]"});
    Quantized wrong = *a.operand->quantized;
    wrong.scales.extent[1] = 1;
    refused(wrong, *b.operand, d, {"a's scales are f32 [16, 1]", "wanted are f32 [16, 2]"});
    refused(result(DType::U32, {s.m, s.k}).view, *b.operand, d, {"a is u32", "quantised tensor"});
    expect_refused(
        [&](Recording& r) {
            fp8::gemm_nt(r, *a.operand, *b.operand, d, false, scratch.view().sub(0, 64));
        },
        {"workspace has 64 bytes", std::to_string(scratch.size())});
    const Input rows = input(kind(Blocks::Rows128), {s.k, s.n}, 1);
    expect_refused(
        [&](Recording& r) { fp8::gemm_nn(r, *a.operand, *rows.operand, d, false, scratch.view()); },
        {"fp8::gemm_nn", "b is e4m3 1x128", "requantize"});
}

} // namespace
} // namespace bellows
