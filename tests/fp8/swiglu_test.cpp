// SPDX-License-Identifier: MIT
// fp8::swiglu and its gradients against the op in f32 followed by quantisation, on the same device,
// bit by bit; both forms of the kernels, rows that are not there, refusals. Unused bytes must keep
// their pattern.

#include "fp8/fused_rig.hpp"

namespace bellows {
namespace {

using namespace testing;
using fp8::Form;

/// f32 and bf16 are gate_up's storage and the gradients'; with codes, the gradients' alone.
struct Input {
    DType act;
    bool codes;
};
constexpr Input kInputs[] = {
    {DType::F32, false}, {DType::BF16, false}, {DType::F32, true}, {DType::BF16, true}};

class Fp8Swiglu : public Fp8Fused {
protected:
    /// gate_up on the device as the fused op reads it, and in f32.
    struct GateUp {
        Tensor plain, f32;
        Case codes;
        Buffer count;
        Input input;

        TensorView view(std::uint64_t present) const {
            const TensorView& v = plain.view;
            return present < v.extent[0] ? v.with_row_count(count.view()) : v;
        }
        Quantized quantized(std::uint64_t present) const {
            Quantized q = codes.quantized;
            if (present < q.codes.extent[0])
                q.codes.row_count = count.view();
            return q;
        }
    };

    static GateUp gate_up(const Input& input, const HostMatrix& x, std::uint64_t present,
                          Format format, ScaleRule rule = ScaleRule::F32) {
        GateUp g;
        g.input = input;
        g.count = words({static_cast<std::uint32_t>(present)});
        if (!input.codes) {
            g.plain = upload(input.act, x, 8);
            g.f32 = upload(DType::F32, rounded(x, input.act), 0);
            return g;
        }
        const Tensor from = upload(DType::F32, x, 0);
        g.codes = make_case({.format = format, .rule = rule}, 1, x.rows, x.columns, 1);
        g.f32 = matrix(DType::F32, 1, x.rows, x.columns, 0);
        run([&](Recording& r) {
            fp8::quantize(r, from.view, g.codes.quantized);
            fp8::dequantize(r, g.codes.quantized, g.f32.view);
        });
        return g;
    }

    /// Gates, ups and gradients of every kind; a few rows hold NaN or infinities.
    static HostMatrix awkward(DType dtype, std::uint64_t rows, std::uint64_t columns,
                              std::uint64_t seed) {
        HostMatrix m = awkward_matrix(dtype, 1, rows, columns, seed);
        const HostMatrix near = matrix_of(
            rows, columns,
            [](test::Random& random) { return static_cast<float>(random.uniform(-12, 12)); }, seed);
        for (std::uint64_t i = 0; i < m.values.size(); ++i)
            if (i / columns % 3 != 0)
                m.values[i] = near.values[i];
        return m;
    }

    static Tensor weights(std::uint64_t rows, std::uint64_t seed) {
        return vector(DType::F32, random(DType::F32, rows, seed, 0, 1));
    }

    static std::string trace(const Input& input, const Recipe& recipe, const Sizes& s, Form form) {
        return name(recipe, input.act, 1, s.rows, s.columns, input.codes ? "codes" : "plain") +
               ", form " + std::to_string(static_cast<int>(form));
    }

    static void check_forward(const Input& input, const Recipe& recipe, const Sizes& s,
                              bool weighted, Form form, std::uint64_t seed) {
        SCOPED_TRACE(trace(input, recipe, s, form));
        const GateUp g = gate_up(input, awkward(input.act, s.rows, 2 * s.columns, seed), s.present,
                                 kFormats[seed % 2]);
        const Tensor w = weights(s.rows, seed);
        const TensorView weight = weighted ? w.view : TensorView{};
        const Tensor hidden = contiguous(s.rows, s.columns);
        const Case expected = make_case(recipe, 1, s.rows, s.columns, 1),
                   c = make_case(recipe, 1, s.rows, s.columns, 1);
        run([&](Recording& r) {
            ops::swiglu_forward(r, g.f32.view.with_row_count(g.count.view()), weight, hidden.view);
        });
        const Tensor to_quantize = strided(hidden);
        run([&](Recording& r) {
            fp8::quantize(r, to_quantize.view.with_row_count(g.count.view()), expected.quantized);
            if (input.codes)
                fp8::swiglu(r, g.quantized(s.present), weight, c.quantized, form);
            else
                fp8::swiglu(r, g.view(s.present), weight, c.quantized, form);
        });
        expect_same(c.codes.buffer, expected.codes.buffer, DType::U8, "codes");
        expect_same(c.scales.buffer, expected.scales.buffer, DType::F32, "scales");
    }

    struct Outputs {
        bool quantized, stored, weighted;
    };
    static constexpr Outputs kOutputs[] = {{true, true, true},
                                           {true, false, false},
                                           {false, true, true},
                                           {true, false, true},
                                           {true, true, false}};

    /// exact: numbers whose sums do not depend on their order, for forms that are not the device's.
    static void check_dgrad(const Input& input, const Recipe& recipe, const Sizes& s,
                            const Outputs& out, Form form, bool exact, std::uint64_t seed) {
        SCOPED_TRACE(trace(input, recipe, s, form) + (out.quantized ? ", quantised" : "") +
                     (out.stored ? ", stored" : "") + (out.weighted ? ", weighted" : ""));
        HostMatrix from = exact ? integers(s.rows, 2 * s.columns, seed)
                                : awkward(input.act, s.rows, 2 * s.columns, seed);
        for (std::uint64_t i = 0; exact && i < from.values.size(); ++i)
            if (i % (2 * s.columns) < s.columns) // silu(128) = 128
                from.values[i] = 128;
        const GateUp g = gate_up(input, from, s.present, kFormats[seed % 2],
                                 exact ? ScaleRule::PowerOfTwo : ScaleRule::F32);
        const HostMatrix d = exact ? integers(s.rows, s.columns, seed + 1)
                                   : awkward(input.act, s.rows, s.columns, seed + 1);
        const Tensor d_hidden = upload(input.act, d, 8), d_f32 = contiguous(rounded(d, input.act)),
                     w = weights(s.rows, seed);
        const TensorView weight = out.weighted ? w.view : TensorView{};

        const Tensor gradient = matrix(DType::F32, 1, s.rows, 2 * s.columns, 0),
                     d_weight = vector(s.rows), d_weight_expected = vector(s.rows);
        const Case expected = make_case(recipe, 1, s.rows, 2 * s.columns, 1),
                   c = make_case(recipe, 1, s.rows, 2 * s.columns, 1);
        const Tensor stored = matrix(input.act, 1, s.rows, 2 * s.columns, 0);
        const TensorView counted = gradient.view.with_row_count(g.count.view());
        const fp8::SwigluGradients to{.quantized = out.quantized ? c.quantized : Quantized{},
                                      .stored = out.stored ? stored.view : TensorView{},
                                      .d_row_weight = out.weighted ? d_weight.view : TensorView{}};
        run([&](Recording& r) {
            ops::swiglu_dgrad(r, d_f32.view, g.f32.view.with_row_count(g.count.view()), weight,
                              gradient.view, out.weighted ? d_weight_expected.view : TensorView{});
            if (out.quantized)
                fp8::quantize(r, counted, expected.quantized);
            if (input.codes)
                fp8::swiglu_dgrad(r, d_hidden.view, g.quantized(s.present), weight, to, form);
            else
                fp8::swiglu_dgrad(r, d_hidden.view, g.view(s.present), weight, to, form);
        });
        expect_same(c.codes.buffer, expected.codes.buffer, DType::U8, "codes");
        expect_same(c.scales.buffer, expected.scales.buffer, DType::F32, "scales");
        expect_same(d_weight.buffer, d_weight_expected.buffer, DType::F32, "d_row_weight");
        const Tensor untouched = matrix(input.act, 1, s.rows, 2 * s.columns, 0),
                     bf16 = to_bf16(gradient, s.present);
        expect_same(stored.buffer,
                    !out.stored                ? untouched.buffer
                    : input.act == DType::BF16 ? bf16.buffer
                                               : gradient.buffer,
                    input.act, "stored");
    }
};

TEST_F(Fp8Swiglu, IsSwigluThenQuantize) {
    std::uint64_t seed = 0;
    for (const Input& input : kInputs)
        for (const Format format : kFormats)
            for (const ScaleRule rule : kRules)
                for (const Form form : {Form::Lanes, Form::Few, Form::Streams})
                    for (const bool weighted : {false, true})
                        check_forward(input, {.format = format, .rule = rule}, {11, 264, 11},
                                      weighted, form, ++seed);
}

TEST_F(Fp8Swiglu, EveryWidth) {
    std::uint64_t seed = 100;
    for (const std::uint64_t ffn : {4u, 8u, 12u, 124u, 128u, 132u, 380u, 512u, 516u, 2048u, 2180u})
        for (const Input& input : kInputs)
            for (const Form form : {Form::Lanes, Form::Few, Form::Streams})
                check_forward(input, {}, {ffn % 3 == 0 ? 70u : 3u, ffn, ffn % 3 == 0 ? 70u : 3u},
                              true, form, ++seed);
}

TEST_F(Fp8Swiglu, AbsentRowsAreLeftAlone) {
    std::uint64_t seed = 200;
    for (const std::uint64_t present : {0u, 1u, 8u, 19u})
        for (const Input& input : kInputs)
            for (const Form form : {Form::Lanes, Form::Few, Form::Streams}) {
                check_forward(input, {}, {20, 128, present}, true, form, ++seed);
                check_dgrad(input, {}, {20, 128, present}, {true, true, true}, form, true, ++seed);
            }
}

// Of each six rows the first so many are there, the last of a group of two.
TEST_F(Fp8Swiglu, RowsByCounts) {
    constexpr std::uint64_t kRows = 20, kPerCount = 6, kFfn = 260, kWhole = 256;
    const std::vector<std::uint32_t> counts = {3, 0, 9, 1};
    const Buffer on_device = words(counts);
    // The bytes of each row that is there are those of `all`, other bytes those of `none`.
    const auto expect_rows = [&](const Tensor& some, const Tensor& all, const Tensor& none) {
        const auto a = read_back<std::uint8_t>(device(), some.buffer.view()),
                   all_of = read_back<std::uint8_t>(device(), all.buffer.view()),
                   none_of = read_back<std::uint8_t>(device(), none.buffer.view());
        const std::uint64_t row = some.view.stride[0] * size_of(some.view.dtype);
        for (std::uint64_t i = 0; i < a.size(); ++i) {
            const std::uint64_t r = i / row;
            const bool there = r < kRows && r % kPerCount < counts[r / kPerCount];
            ASSERT_EQ(a[i], (there ? all_of : none_of)[i]) << "byte " << i << ", row " << r;
        }
    };
    for (const Input& input : kInputs)
        for (const Form form : {Form::Lanes, Form::Few, Form::Streams}) {
            SCOPED_TRACE(trace(input, {}, {kRows, kFfn, kRows}, form));
            GateUp g = gate_up(input, awkward(input.act, kRows, 2 * kFfn, 77), kRows, Format::E4M3);
            const Tensor w = weights(kRows, 77);
            const Case some = make_case({}, 1, kRows, kFfn, 1),
                       all = make_case({}, 1, kRows, kFfn, 1),
                       none = make_case({}, 1, kRows, kFfn, 1);
            const auto record = [&](Recording& r, const Case& to) {
                if (input.codes)
                    fp8::swiglu(r, g.codes.quantized, w.view, to.quantized, form);
                else
                    fp8::swiglu(r, g.plain.view, w.view, to.quantized, form);
            };
            run([&](Recording& r) { record(r, all); });
            TensorView& counted = input.codes ? g.codes.quantized.codes : g.plain.view;
            counted = counted.with_row_counts(on_device.view(), kPerCount);
            run([&](Recording& r) { record(r, some); });
            expect_rows(some.codes, all.codes, none.codes);
            expect_rows(some.scales, all.scales, none.scales);
        }
    for (const DType act : {DType::F32, DType::BF16}) {
        const Tensor gate_up = upload(act, awkward(act, kRows, 2 * kWhole, 78), 0),
                     some = matrix(act, 1, kRows, kWhole, 0),
                     all = matrix(act, 1, kRows, kWhole, 0),
                     none = matrix(act, 1, kRows, kWhole, 0);
        run([&](Recording& r) {
            ops::swiglu_forward(r, gate_up.view, {}, all.view);
            ops::swiglu_forward(r, gate_up.view.with_row_counts(on_device.view(), kPerCount), {},
                                some.view);
        });
        expect_rows(some, all, none);
        refuses(
            [&](Recording& r) {
                ops::swiglu_forward(
                    r, gate_up.view.with_row_counts(on_device.view().sub(0, 12), kPerCount), {},
                    some.view);
            },
            "row counts are 4 u32");
        refuses(
            [&](Recording& r) {
                ops::swiglu_dgrad(r, some.view,
                                  gate_up.view.with_row_counts(on_device.view(), kPerCount), {},
                                  gate_up.view, {});
            },
            "one row count is taken, not one for each 6 rows");
    }
}

TEST_F(Fp8Swiglu, GradientsAreSwigluDgradThenQuantize) {
    std::uint64_t seed = 300;
    for (const Input& input : kInputs)
        for (const Format format : kFormats)
            for (const ScaleRule rule : kRules)
                for (const Outputs& out : kOutputs)
                    check_dgrad(input, {.format = format, .rule = rule}, {11, 256, 11}, out,
                                Form::Device, false, ++seed);
}

TEST_F(Fp8Swiglu, GradientsOfEveryWidth) {
    std::uint64_t seed = 400;
    for (const std::uint64_t ffn : {128u, 384u, 512u, 640u, 2048u, 2176u})
        for (const Input& input : kInputs)
            check_dgrad(input, {}, {ffn % 384 == 0 ? 70u : 3u, ffn, ffn % 384 == 0 ? 70u : 3u},
                        kOutputs[ffn / 128 % 5], Form::Device, false, ++seed);
    for (const std::uint64_t ffn : {4u, 12u, 132u, 2180u}) // not quantised
        for (const Input& input : kInputs)
            check_dgrad(input, {}, {3, ffn, 3}, kOutputs[2], Form::Device, false, ++seed);
}

TEST_F(Fp8Swiglu, GradientsInBothForms) {
    std::uint64_t seed = 500;
    for (const std::uint64_t ffn : {128u, 384u, 512u, 2048u, 2176u})
        for (const Input& input : kInputs)
            for (const Form form : {Form::Lanes, Form::Few, Form::Streams})
                for (const bool exact : {false, true})
                    check_dgrad(input, {}, {3, ffn, 3}, kOutputs[exact ? 0 : 1], form, exact,
                                ++seed);
}

TEST_F(Fp8Swiglu, GradientsMayReplaceWhatTheyAreOf) {
    for (const DType act : {DType::F32, DType::BF16})
        for (const Form form : {Form::Lanes, Form::Few, Form::Streams}) {
            const HostMatrix x = awkward(act, 9, 512, 1), d = awkward(act, 9, 256, 2);
            const Tensor gate_up = upload(act, x, 0), d_hidden = upload(act, d, 0),
                         apart = matrix(act, 1, 9, 512, 0);
            const Case c = make_case({}, 1, 9, 512), expected = make_case({}, 1, 9, 512);
            run([&](Recording& r) {
                fp8::swiglu_dgrad(r, d_hidden.view, gate_up.view, {},
                                  {.quantized = expected.quantized, .stored = apart.view}, form);
                fp8::swiglu_dgrad(r, d_hidden.view, gate_up.view, {},
                                  {.quantized = c.quantized, .stored = gate_up.view}, form);
            });
            expect_same(gate_up.buffer, apart.buffer, act, "stored");
            expect_same(c.codes.buffer, expected.codes.buffer, DType::U8, "codes");
            expect_same(c.scales.buffer, expected.scales.buffer, DType::F32, "scales");
        }
}

TEST_F(Fp8Swiglu, SaysWhatDoesNotFit) {
    const Tensor gate_up = matrix(DType::BF16, 1, 8, 512, 0), w = weights(8, 1),
                 d_hidden = matrix(DType::BF16, 1, 8, 256, 0);
    const Case hidden = make_case({}, 1, 8, 256), both = make_case({}, 1, 8, 512);
    refuses(
        [&](Recording& r) { fp8::swiglu(r, gate_up.view, {}, make_case({}, 1, 8, 128).quantized); },
        "gate_up has 512 columns, wanted are 2 x 128");
    refuses(
        [&](Recording& r) { fp8::swiglu(r, gate_up.view, weights(7, 1).view, hidden.quantized); },
        "row_weight is f32 [7]");
    refuses(
        [&](Recording& r) {
            fp8::swiglu(r, gate_up.view, {},
                        make_case({.blocks = Blocks::Columns128}, 1, 8, 256).quantized);
        },
        "wanted are 1x128 blocks");
    refuses(
        [&](Recording& r) {
            fp8::swiglu(r, make_case({.blocks = Blocks::Columns128}, 1, 8, 512).quantized, {},
                        hidden.quantized);
        },
        "wanted are 1x128 blocks");
    refuses([&](Recording& r) { fp8::swiglu_dgrad(r, d_hidden.view, gate_up.view, {}, {}); },
            "neither codes nor a tensor");
    refuses(
        [&](Recording& r) {
            fp8::swiglu_dgrad(r, d_hidden.view, gate_up.view, w.view,
                              {.quantized = both.quantized});
        },
        "must both be given");
    refuses(
        [&](Recording& r) {
            fp8::swiglu_dgrad(r, matrix(DType::F32, 1, 8, 256, 0).view, gate_up.view, {},
                              {.quantized = both.quantized});
        },
        "d_hidden is f32, gate_up bf16");
    refuses(
        [&](Recording& r) {
            fp8::swiglu_dgrad(r, matrix(DType::BF16, 1, 8, 132, 0).view,
                              matrix(DType::BF16, 1, 8, 264, 0).view, {},
                              {.quantized = make_case({}, 1, 8, 264).quantized});
        },
        "not a multiple of 128");
}

} // namespace
} // namespace bellows
