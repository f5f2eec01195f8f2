// SPDX-License-Identifier: MIT
// Dense products of fp8 operands against f64 products of the same dequantised operands.

#include "fp8/gemm_rig.hpp"

#include <cmath>
#include <limits>
#include <numbers>

namespace bellows {
namespace {

using namespace testing;

class Fp8Gemm : public Fp8GemmTest {
protected:
    struct Shape {
        std::uint64_t m, n, k, batch = 0; ///< batch 0: two dimensions
    };

    static std::vector<std::uint64_t> extents(std::uint64_t batch, std::uint64_t rows,
                                              std::uint64_t columns) {
        return batch == 0 ? std::vector<std::uint64_t>{rows, columns}
                          : std::vector<std::uint64_t>{batch, rows, columns};
    }
    static Input make_a(GemmForm form, const Kind& kind, const Shape& s) {
        return form == GemmForm::TN ? input(kind, extents(s.batch, s.k, s.m), s.m + 1)
                                    : input(kind, extents(s.batch, s.m, s.k), s.m + 1);
    }
    static Input make_b(GemmForm form, const Kind& kind, const Shape& s) {
        return form == GemmForm::NT ? input(kind, extents(s.batch, s.n, s.k), s.n + 2)
                                    : input(kind, extents(s.batch, s.k, s.n), s.n + 2);
    }

    static void record(Recording& r, GemmForm form, const Input& a, const Input& b,
                       const TensorView& d, bool accumulate, const Buffer& scratch) {
        const auto gemm = form == GemmForm::NT   ? fp8::gemm_nt
                          : form == GemmForm::NN ? fp8::gemm_nn
                                                 : fp8::gemm_tn;
        gemm(r, *a.operand, *b.operand, d, accumulate, scratch.view(), way_);
    }

    static std::vector<double> product(GemmForm form, const std::vector<double>& a,
                                       const std::vector<double>& b, const Shape& s) {
        std::vector<double> all;
        const std::uint64_t batches = std::max<std::uint64_t>(s.batch, 1);
        for (std::uint64_t i = 0; i < batches; ++i) {
            const auto at = reference::View(a).subspan(i * s.m * s.k, s.m * s.k);
            const auto bt = reference::View(b).subspan(i * s.n * s.k, s.n * s.k);
            const auto d = form == GemmForm::NT   ? reference::gemm_nt(at, bt, s.m, s.n, s.k)
                           : form == GemmForm::NN ? reference::gemm_nn(at, bt, s.m, s.n, s.k)
                                                  : reference::gemm_tn(at, bt, s.m, s.n, s.k);
            all.insert(all.end(), d.begin(), d.end());
        }
        return all;
    }

    static void check(GemmForm form, const Input& a, const Input& b, const Shape& s, DType storage,
                      bool accumulate = false) {
        const OpTensor d = padded(storage, extents(s.batch, s.m, s.n));
        const auto before = random(storage, d.view.num_elements(), 3);
        if (accumulate)
            write(d.view, before);
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        run([&](Recording& r) { record(r, form, a, b, d, accumulate, scratch); });
        auto expected = product(form, a.values, b.values, s);
        auto magnitudes =
            product(form, reference::absolute(a.values), reference::absolute(b.values), s);
        if (accumulate) {
            reference::accumulate(expected, reference::to_double(before));
            reference::accumulate(magnitudes, reference::absolute(reference::to_double(before)));
        }
        expect_product(read(d.view), expected, magnitudes, {s.m, s.n}, s.k, storage);
        expect_untouched(rig().outside(d), "between D's rows");
    }
};

constexpr GemmForm kForms[] = {GemmForm::NT, GemmForm::NN, GemmForm::TN};
const char* const kFormNames[] = {"nt", "nn", "tn"};

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

/// Just those elements are NaN of which `where` says so, given row and column.
template <class Where>
void expect_nans(const std::vector<float>& values, std::uint64_t columns, const Where& where) {
    for (std::uint64_t i = 0; i < values.size(); ++i)
        ASSERT_EQ(std::isnan(values[i]), where(i / columns, i % columns))
            << i / columns << ", " << i % columns << ": " << values[i];
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

/// Operands whose rows' scales differ by so many powers of two along k, block by block.
std::vector<float> steep(std::uint64_t rows, std::uint64_t columns, int spread, bool by_row,
                         std::uint64_t seed) {
    test::Random random(seed);
    std::vector<float> x(rows * columns);
    for (std::uint64_t i = 0; i < x.size(); ++i) {
        const std::uint64_t k = by_row ? i / columns : i % columns;
        const int down = static_cast<int>((k / 128 * 7 + i % 3) % 3) * spread / 2;
        x[i] = static_cast<float>(std::ldexp(random.uniform(-1, 1), -down));
    }
    return x;
}

TEST_F(Fp8Gemm, PrepackedWeights) {
    if (!fp8::why_not(device(), fp8::Variant::Packed).empty()) {
        const Shape s{8, 8, 128};
        const Input b = make_b(GemmForm::NT, kind(Blocks::Blocks128), s);
        EXPECT_EQ(fp8::prepacked_bytes(device(), *b.operand->quantized), 0u);
        expect_refused(
            [&](Recording& r) { fp8::prepack(r, *b.operand->quantized, GemmForm::NT, {}); },
            {"prepack"});
        return;
    }
    const bool cpu = device().info().is_cpu; // whose compiler takes its time
    way_ = fp8::Variant::Device;             // which prefers them
    std::vector<Shape> shapes = {{7, 37, 300}, {20, 140, 300}, {129, 37, 300}, {3, 130, 129, 2}};
    if (!cpu)
        shapes.insert(shapes.end(),
                      {{16, 72, 900}, {20, 129, 1200}, {33, 40, 520}, {64, 256, 260}});
    for (const GemmForm form : {GemmForm::NT, GemmForm::NN})
        for (const bool own_scales : {false, true})
            for (const Shape& s : shapes) {
                if (cpu && (own_scales || (form == GemmForm::NN && s.m > 7)))
                    continue;
                SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + " " +
                             std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                             std::to_string(s.k) + (own_scales ? "" : ", 128x128"));
                const Blocks own = form == GemmForm::NT ? Blocks::Rows128 : Blocks::Columns128;
                const Input a = make_a(form, kind(Blocks::Rows128), s);
                Input b = make_b(form, kind(own_scales ? own : Blocks::Blocks128), s);
                const fp8::Quantized codes = *b.operand->quantized;
                b.buffers.push_back(workspace(fp8::prepacked_bytes(device(), codes)));
                run([&](Recording& r) {
                    b.operand = fp8::prepack(r, codes, form, b.buffers.back().view());
                });
                // Once packed the codes are not read again.
                const std::vector<std::uint8_t> nans(codes.codes.buffer.bytes, fp8::kNanCode);
                device().upload(codes.codes.buffer, std::span<const std::uint8_t>(nans));
                check(form, a, b, s, DType::F32);
                check(form, a, b, s, DType::F32, true);
                check(form, a, b, s, DType::BF16, true);
            }
}

TEST_F(Fp8Gemm, GroupsThatArePrepackedAloneAreThoseOfTheWhole) {
    if (!fp8::why_not(device(), fp8::Variant::Packed).empty())
        return;
    const Shape s{1, 130, 129, 3};
    for (const GemmForm form : {GemmForm::NT, GemmForm::NN})
        for (const bool own_scales : {false, true}) {
            SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) +
                         (own_scales ? "" : ", 128x128"));
            const Blocks own = form == GemmForm::NT ? Blocks::Rows128 : Blocks::Columns128;
            const Input b = make_b(form, kind(own_scales ? own : Blocks::Blocks128), s);
            const fp8::Quantized& codes = *b.operand->quantized;
            const Buffer whole = workspace(fp8::prepacked_bytes(device(), codes)),
                         parts = workspace(whole.size());
            run([&](Recording& r) {
                r.fill(whole.view(), 0);
                r.fill(parts.view(), 0);
                fp8::prepack(r, codes, form, whole.view());
                fp8::prepack(r, codes, form, parts.view(), 1, 2);
                fp8::prepack(r, codes, form, parts.view(), 0, 1);
            });
            const auto expected = read_back<std::uint8_t>(device(), whole.view());
            EXPECT_EQ(read_back<std::uint8_t>(device(), parts.view()), expected);
            EXPECT_NE(std::ranges::count(expected, 0), static_cast<long>(expected.size()));
            expect_refused([&](Recording& r) { fp8::prepack(r, codes, form, whole.view(), 2, 2); },
                           {"prepack", "groups [2, +2)"});
        }
}

TEST_F(Fp8Gemm, PackedOperandsOnMatrixUnits) {
    const std::string reason = fp8::why_not(device(), fp8::Variant::Packed);
    way_ = fp8::Variant::Packed;
    if (!reason.empty()) {
        const Shape s{8, 8, 128};
        const Input a = make_a(GemmForm::NT, kind(Blocks::Rows128), s),
                    b = make_b(GemmForm::NT, kind(Blocks::Blocks128), s);
        const OpTensor d = padded(DType::F32, {s.m, s.n});
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        expect_refused([&](Recording& r) { record(r, GemmForm::NT, a, b, d, false, scratch); },
                       {"packed", reason});
        return;
    }
    // A CPU's compiler takes half a minute for a kernel: there, one of them, for an odd N, 128x128
    // blocks and f32, must do.
    const bool cpu = device().info().is_cpu;
    const std::vector<Shape> shapes =
        cpu ? std::vector<Shape>{{129, 37, 200}, {7, 5, 129, 2}}
            : std::vector<Shape>{
                  {1, 1, 1}, {130, 129, 200}, {257, 36, 513}, {17, 130, 128}, {70, 66, 129, 3}};
    const std::vector<bool> blocks_or_rows =
        cpu ? std::vector<bool>{true} : std::vector<bool>{true, false};
    const std::vector<int> spreads =
        cpu ? std::vector<int>{22, 24} : std::vector<int>{8, 20, 21, 22, 23, 24, 60};
    for (const GemmForm form : kForms) {
        const bool tn = form == GemmForm::TN;
        const Kind own_a = kind(tn ? Blocks::Columns128 : Blocks::Rows128);
        const Kind own_b = kind(form == GemmForm::NT ? Blocks::Rows128 : Blocks::Columns128);
        for (const Shape& s : shapes)
            for (const bool blocks : blocks_or_rows) {
                SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + " " +
                             std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                             std::to_string(s.k) + (blocks ? ", 128x128" : ""));
                const Input a = make_a(form, own_a, s),
                            b = make_b(form, blocks ? kind(Blocks::Blocks128) : own_b, s);
                check(form, a, b, s, DType::F32, blocks);
                if (!cpu)
                    check(form, a, b, s, DType::BF16, !blocks);
            }
        // 2^22 is what f16 holds; beyond, the slow loop must serve.
        const Shape s{cpu ? 3u : 40u, cpu ? 5u : 24u, 520};
        for (const int spread : spreads)
            for (const bool blocks : blocks_or_rows) {
                SCOPED_TRACE(std::string(kFormNames[static_cast<int>(form)]) + ", scales over 2^" +
                             std::to_string(spread));
                const Input a = input(own_a, tn ? extents(0, s.k, s.m) : extents(0, s.m, s.k),
                                      tn ? steep(s.k, s.m, spread, true, 5)
                                         : steep(s.m, s.k, spread, false, 5));
                const Input b = make_b(form, blocks ? kind(Blocks::Blocks128) : own_b, s);
                check(form, a, b, s, DType::F32);
                if (!cpu)
                    check(form, a, b, s, DType::BF16, true);
            }
    }
}

TEST_F(Fp8Gemm, StreamedWeights) {
    way_ = fp8::Variant::Streamed;
    const std::vector<Shape> shapes = {{1, 1, 1},      {3, 34, 129}, {4, 36, 200},
                                       {17, 130, 513}, {70, 65, 16}, {5, 136, 129, 3}};
    const auto kinds = {kind(Blocks::Rows128),
                        kind(Blocks::Blocks128),
                        kind(Blocks::Rows128, Format::E4M3, ScaleRule::F32),
                        kind(Blocks::Blocks128, Format::E4M3, ScaleRule::F32),
                        kBf16Kind,
                        kF32Kind};
    std::size_t served = 0;
    for (const Kind& a_kind : kinds)
        for (const Kind& b_kind : kinds) {
            if (!streams(a_kind, b_kind))
                continue;
            ++served;
            for (const Shape& s : shapes) {
                SCOPED_TRACE(a_kind.name() + " by " + b_kind.name() + ", " + std::to_string(s.m) +
                             " x " + std::to_string(s.n) + " x " + std::to_string(s.k));
                const Input a = make_a(GemmForm::NT, a_kind, s),
                            b = make_b(GemmForm::NT, b_kind, s);
                check(GemmForm::NT, a, b, s, DType::BF16);
                check(GemmForm::NT, a, b, s, DType::F32, true);
                check(GemmForm::NT, a, b, s, DType::BF16, true);
            }
        }
    EXPECT_GE(served, 12u);
}

TEST_F(Fp8Gemm, StreamedWeightsOnMatrixUnits) {
    way_ = fp8::Variant::Streamed;
    const bool cpu = device().info().is_cpu;
    const std::vector<Shape> shapes =
        cpu ? std::vector<Shape>{{9, 36, 200}, {1, 132, 128, 2}, {3, 8, 521}}
            : std::vector<Shape>{{1, 1, 1},      {16, 64, 128},  {17, 130, 513}, {33, 36, 200},
                                 {64, 260, 640}, {100, 129, 64}, {5, 68, 129, 3}};
    for (const bool direct : {false, true}) {
        if (!stream_on_units(direct))
            continue;
        SCOPED_TRACE(direct ? "straight to registers" : "through workgroup memory");
        for (const Kind& own : {kind(Blocks::Rows128), kind(Blocks::Blocks128)})
            for (const Shape& s : shapes) {
                SCOPED_TRACE(own.name() + ", " + std::to_string(s.m) + " x " + std::to_string(s.n) +
                             " x " + std::to_string(s.k));
                const Input a = make_a(GemmForm::NT, own, s),
                            b = make_b(GemmForm::NT, kind(Blocks::Blocks128), s);
                check(GemmForm::NT, a, b, s, DType::F32, true);
                check(GemmForm::NT, a, b, s, DType::BF16, true);
                if (!cpu)
                    check(GemmForm::NT, a, b, s, DType::BF16);
            }
        // Beyond 2^22, which f16 holds, rows must be computed in another way.
        const Shape s{cpu ? 3u : 40u, cpu ? 8u : 24u, 520};
        for (const int spread : {8, 20, 22, 24, 60}) {
            SCOPED_TRACE("scales over 2^" + std::to_string(spread));
            const Input a = input(kind(Blocks::Rows128), extents(0, s.m, s.k),
                                  steep(s.m, s.k, spread, false, 5));
            check(GemmForm::NT, a, make_b(GemmForm::NT, kind(Blocks::Blocks128), s), s, DType::F32);
        }
    }
}

/// The ways of streaming on this device: f32 arithmetic, and the two of matrix units.
enum class Way : std::uint8_t { Fma, Staged, Direct };
constexpr Way kWays[] = {Way::Fma, Way::Staged, Way::Direct};

/// The code of an element, whose scale stays what it is.
void put_code(Device& device, const Operand& operand, std::uint64_t row, std::uint64_t column,
              std::uint8_t code) {
    const TensorView& codes = operand.quantized->codes;
    auto bytes = read_back<std::uint8_t>(device, codes.buffer);
    bytes[row * codes.stride[0] + column] = code;
    device.upload(codes.buffer, std::span<const std::uint8_t>(bytes));
}

TEST_F(Fp8Gemm, StreamedNaNsMeetTheirRowsAndColumnsAlone) {
    way_ = fp8::Variant::Streamed;
    const Shape s{12, 264, 200};
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const Way way : kWays) {
        const bool units = way != Way::Fma;
        if (units && !stream_on_units(way == Way::Direct))
            continue;
        auto x = random(DType::F32, s.m * s.k, 1), w = random(DType::F32, s.n * s.k, 2);
        x[7 * s.k + 150] = nan;
        w[130 * s.k + 5] = nan;
        const Input a = input(kind(Blocks::Rows128), {s.m, s.k}, x),
                    b = input(kind(Blocks::Blocks128), {s.n, s.k}, w);
        put_code(device(), *a.operand, 9, 199, 0xFF);
        put_code(device(), *b.operand, 3, 17, 0x7F);
        put_code(device(), *b.operand, 263, 130, 0xFF);
        const OpTensor d = padded(DType::F32, {s.m, s.n});
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        run([&](Recording& r) { record(r, GemmForm::NT, a, b, d, false, scratch); });
        expect_nans(read(d.view), s.n, [](auto m, auto n) {
            return m == 7 || m == 9 || (n >= 128 && n < 256) || n == 3 || n == 263;
        });
    }
}

/// An element's bits depend on its row and column alone: not on the other rows, nor on the tile. By
/// themselves GPUs take other kernels for more rows, hence other bits.
TEST_F(Fp8Gemm, StreamedRowsHaveTheSameBitsAmongOthers) {
    way_ = fp8::Variant::Streamed;
    const Shape s{37, 64, 400};
    const bool cpu = device().info().is_cpu;
    for (const Way way : kWays) {
        const bool units = way != Way::Fma;
        if (units ? !stream_on_units(way == Way::Direct) : !cpu && streaming_on_units(true))
            continue;
        const fp8::Tile usual = way_.tile;
        if (way == Way::Direct && !cpu) // that of one row is the kernel's own
            way_.tile = {.fragments_m = 2, .fragments_n = 4, .warps_k = 4};
        const Input a = make_a(GemmForm::NT, kind(Blocks::Rows128), s),
                    b = make_b(GemmForm::NT, kind(Blocks::Blocks128), s);
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        const auto bits = [&](std::uint64_t first, std::uint64_t rows) {
            Quantized part = *a.operand->quantized;
            part.codes = part.codes.rows(first, rows);
            part.scales = part.scales.rows(first, rows);
            const OpTensor d = padded(DType::F32, {rows, s.n});
            run([&](Recording& r) {
                fp8::gemm_nt(r, part, *b.operand, d, false, scratch.view(), way_);
            });
            return read(d.view);
        };
        const auto all = bits(0, s.m);
        if (units && cpu)
            way_.tile =
                way == Way::Direct
                    ? fp8::Tile{.fragments_m = 3, .fragments_n = 2, .warps_k = 2}
                    : fp8::Tile{.fragments_m = 2, .fragments_n = 1, .warps_n = 4, .step_k = 128};
        else
            way_.tile = usual;
        for (const std::uint64_t row : {0u, 16u, 36u}) {
            const auto one = bits(row, 1);
            EXPECT_TRUE(std::equal(one.begin(), one.end(),
                                   all.begin() + static_cast<std::ptrdiff_t>(row * s.n)))
                << "row " << row << (units ? " on matrix units" : "");
        }
        if (!units && gemm_class(device()).units == GemmClass::Units::None) {
            way_ = fp8::Variant::Decoded; // "f32-sequential" both
            EXPECT_EQ(bits(0, s.m), all);
            way_ = fp8::Variant::Streamed;
        }
    }
}

TEST_F(Fp8Gemm, DirectProducts) {
    const bool cpu = device().info().is_cpu; // whose compiler takes half a minute for a kernel
    int number = 0;
    for (const fp8::Way& way : direct_on_units()) {
        way_ = way;
        for (const Shape& s : {Shape{16, 32, 128},
                               {35, 66, 512},
                               {1, 1, 8},
                               {17, 33, 136},
                               {70, 130, 200},
                               {5, 40, 72, 3},
                               {260, 272, 1000}}) {
            if (cpu && number > 0 && s.k % 128 == 0)
                continue;
            SCOPED_TRACE(std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                         std::to_string(s.k) + ", tile " + std::to_string(number));
            const Input a = make_a(GemmForm::NT, kBf16Kind, s),
                        b = make_b(GemmForm::NT, kBf16Kind, s);
            if (!cpu || number == 2)
                check(GemmForm::NT, a, b, s, DType::BF16);
            if (!cpu || number != 2)
                check(GemmForm::NT, a, b, s, DType::F32, true);
            if (!cpu || number == 2) // the kernel of D overwritten
                check(GemmForm::NT, a, b, s, DType::BF16, true);
        }
        ++number;
    }
}

/// Of every tile, whatever the other rows and the place of D, again and again.
TEST_F(Fp8Gemm, DirectProductsHaveTheSameBits) {
    const Shape s{37, 64, 328};
    std::vector<float> all;
    for (const fp8::Way& way : direct_on_units()) {
        way_ = way;
        const Input a = make_a(GemmForm::NT, kBf16Kind, s), b = make_b(GemmForm::NT, kBf16Kind, s);
        const auto bits = [&](std::uint64_t first, const OpTensor& d) {
            const TensorView rows = a.operand->values.rows(first, d.view.extent[0]);
            run([&](Recording& r) { fp8::gemm_nt(r, rows, *b.operand, d, false, {}, way_); });
            return read(d.view);
        };
        if (all.empty()) {
            all = bits(0, padded(DType::F32, {s.m, s.n}));
            EXPECT_EQ(bits(0, result(DType::F32, {s.m, s.n})), all) << "where rows are aligned";
        }
        EXPECT_EQ(bits(0, padded(DType::F32, {s.m, s.n})), all);
        for (const std::uint64_t row : {0u, 16u, 36u}) {
            const auto one = bits(row, padded(DType::F32, {1, s.n}));
            EXPECT_TRUE(std::equal(one.begin(), one.end(),
                                   all.begin() + static_cast<std::ptrdiff_t>(row * s.n)))
                << "row " << row;
        }
    }
}

/// What is read instead of k that do not exist counts as 0.
TEST_F(Fp8Gemm, DirectProductsOfInfinities) {
    const Shape s{20, 40, 136};
    const float infinity = std::numeric_limits<float>::infinity();
    auto x = random(DType::BF16, s.m * s.k, 1, 0.5, 1),
         w = random(DType::BF16, s.n * s.k, 2, 0.5, 1);
    x[3 * s.k + 135] = infinity;
    w[7 * s.k + 130] = infinity;
    for (const fp8::Way& way : direct_on_units()) {
        way_ = way;
        const Input a = input(kBf16Kind, {s.m, s.k}, x), b = input(kBf16Kind, {s.n, s.k}, w);
        const OpTensor d = padded(DType::F32, {s.m, s.n});
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        run([&](Recording& r) { record(r, GemmForm::NT, a, b, d, false, scratch); });
        const auto values = read(d.view);
        for (std::uint64_t i = 0; i < values.size(); ++i)
            ASSERT_EQ(values[i] == infinity, i / s.n == 3 || i % s.n == 7)
                << i / s.n << ", " << i % s.n << ": " << values[i];
    }
}

TEST_F(Fp8Gemm, DirectProductsSayWhatTheyDoNotServe) {
    const auto ways = direct_on_units();
    if (ways.empty())
        return;
    way_ = ways.front();
    const Shape s{16, 32, 64};
    const Input a = make_a(GemmForm::NT, kBf16Kind, s), b = make_b(GemmForm::NT, kBf16Kind, s);
    const OpTensor d = padded(DType::F32, {s.m, s.n});
    const auto refused = [&](const Operand& x, const Operand& y, const std::string& word) {
        const Buffer scratch = workspace_for(x, y);
        expect_refused([&](Recording& r) { fp8::gemm_nt(r, x, y, d, false, scratch.view(), way_); },
                       {"fp8::gemm_nt", "direct variant does not serve", word});
    };
    refused(*make_a(GemmForm::NT, kind(Blocks::Rows128), s).operand, *b.operand, "bf16 operands");
    refused(*a.operand, *make_b(GemmForm::NT, kF32Kind, s).operand, "bf16 operands");
    const Shape odd{16, 32, 60};
    refused(*make_a(GemmForm::NT, kBf16Kind, odd).operand,
            *make_b(GemmForm::NT, kBf16Kind, odd).operand, "a is bf16 [16, 60]");
    TensorView shifted = b.operand->values;
    shifted.buffer = shifted.buffer.sub(2, shifted.buffer.bytes - 2);
    refused(*a.operand, shifted, "multiples of 16 bytes");
    way_.tile.fragments_n = 64;
    refused(*a.operand, *b.operand, "the tile is none");
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
