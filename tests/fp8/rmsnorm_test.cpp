// SPDX-License-Identifier: MIT
// fp8::rmsnorm against the op in f32 followed by quantisation, on the same device, bit by bit; both
// forms of the kernels, rows that are not there, refusals. Unused bytes must keep their pattern.

#include "fp8/fused_rig.hpp"

namespace bellows {
namespace {

using namespace testing;
using fp8::Form;

struct Kind {
    DType act, gain;
};
constexpr Kind kKinds[] = {
    {DType::F32, DType::F32}, {DType::BF16, DType::F32}, {DType::BF16, DType::BF16}};

class Fp8Rmsnorm : public Fp8Fused {
protected:
    static void check(const Kind& kind, const Recipe& recipe, const Sizes& s, const HostMatrix& x,
                      Form form, bool store_y, std::vector<float> factors = {}) {
        const std::uint64_t rows = s.rows, columns = s.columns;
        SCOPED_TRACE(name(recipe, kind.act, 1, rows, columns, to_string(kind.gain)) + ", form " +
                     std::to_string(static_cast<int>(form)));
        const Tensor in = upload(kind.act, x, 8);
        const Tensor in_f32 = upload(DType::F32, rounded(x, kind.act), 8);
        if (factors.empty())
            factors = random(DType::BF16, columns, 3 * columns, -2, 2);
        const Tensor gain = vector(kind.gain, factors), gain_f32 = vector(DType::F32, factors);
        const Buffer count = words({static_cast<std::uint32_t>(s.present)});

        const Tensor y_f32 = matrix(DType::F32, 1, rows, columns, 8), inv_expected = vector(rows);
        const Case expected = make_case(recipe, 1, rows, columns, 1);
        run([&](Recording& r) {
            ops::rmsnorm_forward(r, in_f32.view.rows(0, s.present), gain_f32.view,
                                 y_f32.view.rows(0, s.present),
                                 inv_expected.view.rows(0, s.present), 1e-6f);
            fp8::quantize(r, y_f32.view.with_row_count(count.view()), expected.quantized);
        });

        const Tensor y = matrix(kind.act, 1, rows, columns, 8), inv_rms = vector(rows);
        const Case c = make_case(recipe, 1, rows, columns, 1);
        const TensorView view = s.present < rows ? in.view.with_row_count(count.view()) : in.view;
        run([&](Recording& r) {
            fp8::rmsnorm(r, view, gain.view, c.quantized, inv_rms.view, 1e-6f,
                         store_y ? y.view : TensorView{}, form);
        });
        expect_same(c.codes.buffer, expected.codes.buffer, DType::U8, "codes");
        expect_same(c.scales.buffer, expected.scales.buffer, DType::F32, "scales");
        expect_same(inv_rms.buffer, inv_expected.buffer, DType::F32, "inv_rms");
        const Tensor untouched = matrix(kind.act, 1, rows, columns, 8);
        const Tensor y_bf16 = to_bf16(y_f32, s.present);
        expect_same(y.buffer,
                    !store_y                  ? untouched.buffer
                    : kind.act == DType::BF16 ? y_bf16.buffer
                                              : y_f32.buffer,
                    kind.act, "y");
    }
};

TEST_F(Fp8Rmsnorm, IsRmsnormThenQuantize) {
    std::uint64_t seed = 0;
    for (const Kind& kind : kKinds)
        for (const Format format : kFormats)
            for (const ScaleRule rule : kRules) {
                const Recipe recipe{.format = format, .rule = rule};
                for (const std::uint64_t columns : {264u, 1024u}) {
                    const HostMatrix x = awkward_matrix(kind.act, 1, 21, columns, ++seed);
                    check(kind, recipe, {21, columns, 21}, x, Form::Device, seed % 2 == 0);
                }
            }
}

TEST_F(Fp8Rmsnorm, EveryNumberOfColumns) {
    std::uint64_t seed = 100;
    for (const std::uint64_t columns :
         {4u, 8u, 12u, 20u, 124u, 128u, 132u, 192u, 380u, 512u, 516u, 2052u, 8192u, 8708u})
        for (const Kind& kind : kKinds) {
            const HostMatrix x = awkward_matrix(kind.act, 1, 3, columns, ++seed);
            check(kind, {}, {3, columns, 3}, x, Form::Device, seed % 2 == 0);
        }
}

TEST_F(Fp8Rmsnorm, BothForms) {
    for (const std::uint64_t columns :
         {4u, 12u, 128u, 132u, 192u, 380u, 512u, 516u, 2052u, 8192u, 8708u})
        for (const Kind& kind : kKinds)
            for (const Form form : {Form::Lanes, Form::Few, Form::Streams})
                for (const ScaleRule rule : kRules)
                    check(kind, {.rule = rule}, {5, columns, 5}, integers(5, columns, columns),
                          form, columns % 8 == 0);
}

// Blocks whose largest value is where scales turn, give or take the last places.
TEST_F(Fp8Rmsnorm, ScalesTurnAtTheExactMaximum) {
    const std::uint64_t rows = 16, columns = 2056;
    HostMatrix x{1, rows, columns, std::vector<float>(rows * columns)};
    for (std::uint64_t row = 0; row < rows; ++row)
        for (std::uint64_t column = 0; column < columns; ++column)
            x.at(row, column) = static_cast<float>(129 + 3 * row) / (column % 2 != 0 ? 64 : -64);
    for (const Kind& kind : kKinds)
        for (const Format format : kFormats)
            for (const bool store_y : {false, true})
                check(kind, {.format = format}, {rows, columns, rows}, x, Form::Lanes, store_y,
                      std::vector<float>(columns, 1.75f));
}

TEST_F(Fp8Rmsnorm, AbsentRowsAreLeftAlone) {
    for (const std::uint64_t present : {0u, 1u, 8u, 19u})
        for (const Form form : {Form::Lanes, Form::Few, Form::Streams})
            check(kKinds[1], {}, {20, 144, present}, integers(20, 144, present), form, true);
}

TEST_F(Fp8Rmsnorm, ManyRows) {
    check(kKinds[1], {}, {70001, 4, 70001}, integers(70001, 4, 1), Form::Lanes, false);
}

TEST_F(Fp8Rmsnorm, SaysWhatDoesNotFit) {
    const Tensor x = matrix(DType::BF16, 1, 8, 256, 0), gain = vector(256), inv_rms = vector(8);
    const Case good = make_case({}, 1, 8, 256);
    refuses(
        [&](Recording& r) {
            fp8::rmsnorm(r, x.view, gain.view,
                         make_case({.blocks = Blocks::MX32}, 1, 8, 256).quantized, inv_rms.view,
                         1e-6f);
        },
        "wanted are 1x128 blocks");
    refuses(
        [&](Recording& r) {
            fp8::rmsnorm(r, x.view, vector(252).view, good.quantized, inv_rms.view, 1e-6f);
        },
        "gain is f32 [252], wanted is f32 [256]");
    refuses(
        [&](Recording& r) {
            fp8::rmsnorm(r, x.view, gain.view, good.quantized, vector(7).view, 1e-6f);
        },
        "inv_rms is f32 [7]");
    refuses(
        [&](Recording& r) {
            fp8::rmsnorm(r, x.view, gain.view, make_case({}, 1, 8, 128).quantized, inv_rms.view,
                         1e-6f);
        },
        "wanted are 8 x 256");
    refuses(
        [&](Recording& r) {
            fp8::rmsnorm(r, matrix(DType::BF16, 1, 8, 254, 0).view, vector(254).view,
                         make_case({}, 1, 8, 254).quantized, inv_rms.view, 1e-6f);
        },
        "254, not a multiple of 4");
    refuses(
        [&](Recording& r) {
            fp8::rmsnorm(r, x.view, gain.view, good.quantized, inv_rms.view, 1e-6f,
                         matrix(DType::F32, 1, 8, 256, 0).view);
        },
        "y is f32 [8, 256], wanted is bf16 [8, 256]");
}

} // namespace
} // namespace bellows
