// SPDX-License-Identifier: MIT
// Products of few rows against f64: every storage of weights, norms ahead, what stands behind the
// sum, and experts by ids.
#include "verify/checks/few_rows_rig.hpp"

#include "verify/checks/router_cases.hpp"
#include "verify/reference/fp8.hpp"
#include "verify/reference/ops.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/few_rows.hpp>
#include <bellows/kernels/kernels.hpp>

#include <optional>

namespace bellows::checks {

namespace {

using namespace few_rows;
using fp8::FewRowsForm;
using reference::to_double;
using reference::Vector;
using Result = FewRowsForm::Result;

Bounded swiglu(const Bounded& gate, const Bounded& up) {
    const double silu = gate.value / (1 + std::exp(-gate.value)), y = silu * up.value;
    return {y, 1.1 * gate.error * (std::abs(up.value) + up.error) + std::abs(silu) * up.error +
                   12 * reference::kF32Epsilon * std::abs(y)};
}

/// x as RMSNorm makes it.
Vector normalised(const Vector& x, const Vector& gain, std::uint64_t rows, double eps) {
    return reference::rmsnorm_forward(x, gain, rows, gain.size(), eps).y;
}

enum class Gain : std::uint8_t { None, F32, Act };

struct NtCase {
    Kind kind;
    std::uint64_t n, k, rows, batch = 1; ///< n: results of a row
    Gain gain = Gain::None;
    Result result = Result::Store;
    bool f32_y = false;
    fp8::FewRowsCut cut = {};
    bool nan = false;
    Depth depth = Depth::Quick;
};

constexpr auto kStaged = fp8::FewRowsCut::Staged::Yes;

constexpr auto kNtCases = std::to_array<NtCase>({
    {Kind::Values, 5, 16, 1},
    {Kind::Values, 64, 136, 8, 1, Gain::Act, Result::Store, true},
    {Kind::Values, 12, 40, 3, 4},
    {Kind::Values, 20, 64, 2, 1, Gain::F32, Result::Swiglu},
    {Kind::PowersOfTwo, 131, 260, 1, 1, Gain::F32},
    {Kind::PowersOfTwo, 36, 512, 4, 1, Gain::Act, Result::Swiglu},
    {Kind::PowersOfTwo, 33, 36, 5, 1, Gain::None, Result::Add},
    {Kind::F32Scales, 150, 384, 7, 1, Gain::Act, Result::Swiglu},
    {Kind::F32Scales, 7, 1040, 8, 1, Gain::None, Result::Add},
    {Kind::PowersOfTwo, 9, 128, 6, 3},
    {Kind::PowersOfTwo, 70, 144, 2, 1, Gain::F32, Result::Store, true, {}, true},
    {Kind::PowersOfTwo, 260, 1024, 1, 1, Gain::F32, Result::Swiglu, false, {64, 8, 2}},
    {Kind::PowersOfTwo, 21, 260, 3, 1, Gain::Act, Result::Store, true, {8, 2, 4, kStaged}},
    {Kind::F32Scales, 24, 272, 1, 1, Gain::F32, Result::Swiglu, false, {16, 4, 4, kStaged}, true},
    {Kind::PowersOfTwo, 18, 36, 2, 1, Gain::None, Result::Add, false, {1, 4, 32, kStaged}},
    {Kind::Values, 128, 512, 1, 16, Gain::None, Result::Store, false, {}, false, Depth::Full},
    {Kind::PowersOfTwo, 576, 2048, 1, 1, Gain::F32, Result::Store, false, {}, false, Depth::Full},
    {Kind::PowersOfTwo,
     300,
     2816,
     8,
     1,
     Gain::None,
     Result::Add,
     false,
     {32, 2, 4},
     false,
     Depth::Full},
});

void check_nt(Check& check, const OpRig& rig, DType act, const NtCase& c) {
    check.begin_case(std::to_string(c.rows) + " rows by " + by(c.n, c.k));
    constexpr double kEps = 1e-5;
    const bool gated = c.result == Result::Swiglu;
    const std::uint64_t matrix = gated ? 2 * c.n : c.n;
    const FewRowsWeights w =
        make_weights(rig, act, c.kind, c.batch == 1 ? 0 : c.batch, matrix, c.k,
                     c.nan ? std::optional<std::uint64_t>(2 * c.k + 3) : std::nullopt);
    // Rows of a batch stand side by side, as heads do.
    const auto x = OpRig::random(act, c.rows * c.batch * c.k, 1);
    const OpTensor x_t = rig.tensor(act, {c.rows, c.batch, c.k}, x);
    const DType type = c.f32_y ? DType::F32 : act,
                gain_type = c.gain == Gain::Act ? act : DType::F32;
    const std::uint64_t wide = round_up(c.n, 4) + 4;
    const OpTensor y = rig.head(type, {c.rows, c.batch, wide}, c.n);
    const auto before = OpRig::random(type, c.rows * c.batch * c.n, 2);
    if (c.result == Result::Add)
        rig.write(y.view, before);
    const auto gain = OpRig::random(gain_type, c.k, 3, 0.5, 1.5);
    const OpTensor gain_t = rig.tensor(gain_type, {c.k}, gain);
    FewRowsForm form{.result = c.result, .cut = c.cut};
    if (c.gain != Gain::None) {
        form.gain = gain_t;
        form.eps = static_cast<float>(kEps);
    }
    const auto of_batch = [&](TensorView view) {
        if (c.batch == 1)
            return view.reshaped({c.rows, view.extent[2]});
        std::swap(view.extent[0], view.extent[1]);
        std::swap(view.stride[0], view.stride[1]);
        return view;
    };
    TensorView to = y.view;
    if (c.batch == 1) {
        to.rank = 2;
        to.extent = {c.rows, c.n};
        to.stride = {wide, 1};
    } else {
        to = of_batch(to);
    }
    rig.run([&](Recording& r) { fp8::few_rows_nt(r, of_batch(x_t), w.operand, to, form); });
    const Vector values = c.gain == Gain::None
                              ? to_double(x)
                              : normalised(to_double(x), to_double(gain), c.rows * c.batch, kEps);
    std::vector<Bounded> expected;
    for (std::uint64_t r = 0; r < c.rows; ++r)
        for (std::uint64_t b = 0; b < c.batch; ++b)
            for (std::uint64_t i = 0; i < c.n; ++i) {
                const auto sum = [&](std::uint64_t row) {
                    return dot(values, (r * c.batch + b) * c.k, w.values, (b * matrix + row) * c.k,
                               c.k);
                };
                Bounded e = gated ? swiglu(sum(i), sum(c.n + i)) : sum(i);
                if (c.result == Result::Add)
                    e.value += static_cast<double>(before[expected.size()]);
                expected.push_back(e);
            }
    auto actual = rig.read(y.view);
    if (c.nan) // row 2 of the matrix is not a number, for every row of x, and nothing else is
        for (std::uint64_t r = 0; r < c.rows; ++r) {
            check.that("NaN", std::isnan(actual[r * c.n + 2]), "a NaN code was lost");
            actual[r * c.n + 2] = 0;
            expected[r * c.n + 2] = {};
        }
    compare(check, "product", actual, expected, type);
    check.untouched("product", rig.outside(y, y.view));
}

struct ExpertsCase {
    Kind kind;
    std::uint64_t rows, count, top_k, experts; ///< count: rows that exist
    std::uint64_t hidden, ffn, shared;         ///< shared: features of shared experts
    Gain gain = Gain::F32;
    fp8::FewRowsCut cut = {};
    Depth depth = Depth::Quick;
};

constexpr auto kExpertsCases = std::to_array<ExpertsCase>({
    {Kind::Values, 2, 2, 2, 3, 16, 24, 0, Gain::None},
    {Kind::Values, 1, 1, 3, 4, 48, 32, 64},
    {Kind::PowersOfTwo, 8, 5, 4, 6, 36, 132, 148},
    {Kind::F32Scales, 3, 3, 6, 9, 256, 128, 0, Gain::Act},
    {Kind::PowersOfTwo, 4, 4, 2, 5, 144, 48, 96, Gain::F32, {8, 4, 4}},
    {Kind::Values, 2, 1, 3, 4, 32, 40, 48, Gain::Act, {16, 4, 1}},
    {Kind::PowersOfTwo, 1, 1, 6, 12, 2048, 704, 1408, Gain::F32, {}, Depth::Full},
});

/// Every expert once and again; one choice is none, another nobody's.
std::vector<std::int32_t> choices(const ExpertsCase& c) {
    auto ids = reference::random_indices(c.rows * c.top_k, 5, c.experts);
    if (ids.size() > 3) {
        ids[1] = -1;
        ids[ids.size() - 1] = ids[ids.size() - 2];
        ids[2] = static_cast<std::int32_t>(c.experts);
    }
    return ids;
}

void check_experts(Check& check, const OpRig& rig, DType act, const ExpertsCase& c) {
    check.begin_case(std::to_string(c.rows) + " rows, " + std::to_string(c.experts) + " experts " +
                     by(c.ffn, c.hidden));
    constexpr double kEps = 1e-6;
    const std::uint64_t slots = c.rows * c.top_k;
    const FewRowsWeights up = make_weights(rig, act, c.kind, c.experts, 2 * c.ffn, c.hidden),
                         down = make_weights(rig, act, c.kind, c.experts, c.hidden, c.ffn);
    const auto x = OpRig::random(act, c.rows * c.hidden, 1),
               h = OpRig::random(act, slots * c.ffn, 2),
               before = OpRig::random(act, c.rows * c.hidden, 3),
               shared = OpRig::random(act, c.rows * c.shared, 4);
    const auto shares = reference::random_f32(slots, 6, 0, 1);
    const DType gain_type = c.gain == Gain::Act ? act : DType::F32;
    const auto gain = OpRig::random(gain_type, c.hidden, 8, 0.5, 1.5);
    const auto ids = choices(c);
    const OpTensor ids_t = rig.tensor(DType::I32, {c.rows, c.top_k}, ids),
                   count = rig.tensor(DType::U32, {1}, std::vector<std::uint64_t>{c.count}),
                   x_t = rig.tensor(act, {c.rows, c.hidden}, x),
                   h_t = rig.tensor(act, {slots, c.ffn}, h),
                   y = rig.tensor(act, {c.rows, c.hidden}, before),
                   gated = rig.result(act, {slots, c.ffn}),
                   shares_t = rig.tensor(DType::F32, {c.rows, c.top_k}, shares),
                   gain_t = rig.tensor(gain_type, {c.hidden}, gain);
    const TensorView chosen = ids_t.view.with_row_count(count.view.buffer);
    FewRowsForm form{.result = Result::Swiglu};
    if (c.gain != Gain::None) {
        form.gain = gain_t;
        form.eps = static_cast<float>(kEps);
    }
    form.cut = c.cut;
    fp8::FewRowsExperts sum{.hidden = h_t,
                            .weights = down.operand,
                            .ids = chosen,
                            .choice_weights = shares_t,
                            .cut = c.cut};
    OpTensor shared_t;
    FewRowsWeights shared_down;
    if (c.shared > 0) {
        shared_t = rig.tensor(act, {c.rows, c.shared}, shared);
        shared_down = make_weights(rig, act, c.kind, 0, c.hidden, c.shared);
        sum.shared = shared_t;
        sum.shared_weights = shared_down.operand;
    }
    rig.run([&](Recording& r) {
        fp8::few_rows_by_ids(r, x_t, up.operand, chosen, gated, form);
        fp8::few_rows_experts(r, sum, y);
    });

    const Vector values = c.gain == Gain::None
                              ? to_double(x)
                              : normalised(to_double(x), to_double(gain), c.rows, kEps);
    const Vector hd = to_double(h), sd = to_double(shared);
    std::vector<Bounded> expected;
    std::vector<float> found;
    for (std::uint64_t s = 0; s < slots; ++s) {
        const auto actual = rig.read(gated.view.rows(s, 1));
        const auto expert = static_cast<std::uint64_t>(ids[s]);
        if (s / c.top_k >= c.count || ids[s] < 0 || expert >= c.experts) {
            check.that("SwiGLU", std::ranges::all_of(actual, untouched),
                       "slot " + std::to_string(s) + " has no expert, but was written");
            continue;
        }
        for (std::uint64_t i = 0; i < c.ffn; ++i) {
            const auto of = [&](std::uint64_t row) {
                return dot(values, s / c.top_k * c.hidden, up.values,
                           (expert * 2 * c.ffn + row) * c.hidden, c.hidden);
            };
            expected.push_back(swiglu(of(i), of(c.ffn + i)));
            found.push_back(actual[i]);
        }
    }
    compare(check, "SwiGLU", found, expected, act);

    std::vector<Bounded> sums;
    for (std::uint64_t r = 0; r < c.rows; ++r)
        for (std::uint64_t i = 0; i < c.hidden; ++i) {
            Bounded e{static_cast<double>(before[r * c.hidden + i]), 0};
            for (std::uint64_t k = 0; k < c.top_k && r < c.count; ++k) {
                const std::uint64_t s = r * c.top_k + k;
                const auto expert = static_cast<std::uint64_t>(ids[s]);
                if (ids[s] < 0 || expert >= c.experts)
                    continue;
                const Bounded d =
                    dot(hd, s * c.ffn, down.values, (expert * c.hidden + i) * c.ffn, c.ffn);
                e.value += static_cast<double>(shares[s]) * d.value;
                e.error += static_cast<double>(c.top_k + 1) * d.error;
            }
            if (c.shared > 0 && r < c.count) {
                const Bounded d = dot(sd, r * c.shared, shared_down.values, i * c.shared, c.shared);
                e.value += d.value;
                e.error += static_cast<double>(c.top_k + 1) * d.error;
            }
            sums.push_back(e);
        }
    compare(check, "sum", rig.read(y.view), sums, act);
}

struct RoutedCase {
    std::uint64_t rows, count, experts, top_k; ///< count: rows that exist
    ops::RouterOptions options;
    bool bias;
    fp8::FewRowsCut cut = {};
    Depth depth = Depth::Quick;
};

using Score = ops::RouterOptions::Score;
constexpr auto kRoutedCases = std::to_array<RoutedCase>({
    {1, 1, 5, 5, {Score::Softmax, 1, 1, 2, true, 1}, false},
    {3, 2, 13, 3, {Score::Sigmoid, 1, 1, 2, false, 0.5f}, true, {8, 4, 2}},
    {2, 2, 24, 4, {Score::Sigmoid, 6, 2, 2, true, 2.5f}, true, {8, 4, 8, kStaged}},
    {2, 1, 70, 6, {Score::Softmax, 1, 1, 2, true, 16}, false, {8, 4, 16, kStaged}},
    {4, 4, 64, 6, {Score::Softmax, 1, 1, 2, false, 1}, false, {}, Depth::Full},
    {1, 1, 256, 8, {Score::Sigmoid, 8, 4, 2, true, 2.5f}, true, {}, Depth::Full},
    {2, 2, 160, 6, {Score::Softmax, 8, 3, 1, false, 16}, false, {16, 4, 16}, Depth::Full},
});

/// Ids and weights have the bits of the router's own kernel, equal and absent logits included, and
/// products those of the experts by their ids.
void check_routed(Check& check, const OpRig& rig, DType act, const RoutedCase& c) {
    check.begin_case(std::to_string(c.rows) + " rows, " + std::to_string(c.top_k) + " of " +
                     std::to_string(c.experts) + " experts");
    constexpr std::uint64_t kHidden = 48, kFfn = 12;
    const std::uint64_t slots = c.rows * c.top_k;
    const auto word = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
    const FewRowsWeights up =
        make_weights(rig, act, Kind::PowersOfTwo, c.experts, 2 * kFfn, kHidden);
    auto logits = reference::random_f32(c.rows * c.experts, 4, -4, 4);
    logits[1] = logits[0];
    logits[c.experts - 1] = std::numeric_limits<float>::quiet_NaN();
    if (c.options.score == Score::Softmax) // of which every score would be one
        logits[c.experts - 1] = logits[0];
    const OpTensor logits_t = rig.tensor(DType::F32, {c.rows, c.experts}, logits),
                   bias = rig.tensor(DType::F32, {c.experts},
                                     reference::random_f32(c.experts, 5, -0.1, 0.1)),
                   count = rig.tensor(DType::U32, {1}, std::vector<std::uint64_t>{c.count}),
                   x = rig.tensor(act, {c.rows, kHidden}, OpRig::random(act, c.rows * kHidden, 1)),
                   gain = rig.tensor(DType::F32, {kHidden},
                                     OpRig::random(DType::F32, kHidden, 8, 0.5, 1.5));
    const OpTensor scores = rig.result(DType::F32, {c.rows, c.experts});
    struct Way {
        OpTensor ids, weights, hidden;
    };
    const auto make_way = [&] {
        return Way{rig.result(DType::I32, {c.rows, c.top_k}),
                   rig.result(DType::F32, {c.rows, c.top_k}), rig.result(act, {slots, kFfn})};
    };
    const Way apart = make_way(), together = make_way();
    const fp8::FewRowsForm form{.result = Result::Swiglu, .gain = gain, .eps = 1e-6f, .cut = c.cut};
    rig.run([&](Recording& r) {
        r.dispatch(kernels::RouterForward{.constants = {.local_size = 32,
                                                        .row_per_workgroup = 1,
                                                        .shared_experts = word(c.experts)},
                                          .logits = logits_t.view.buffer,
                                          .bias = bias.view.buffer,
                                          .scores = scores.view.buffer,
                                          .topk_ids = apart.ids.view.buffer,
                                          .topk_weights = apart.weights.view.buffer,
                                          .tokens = word(c.rows),
                                          .experts = word(c.experts),
                                          .top_k = word(c.top_k),
                                          .groups = c.options.groups,
                                          .group_top_k = c.options.group_top_k,
                                          .group_score_top = c.options.group_score_top,
                                          .use_softmax = c.options.score == Score::Softmax,
                                          .normalise = c.options.normalise,
                                          .has_bias = c.bias,
                                          .route_scale = c.options.route_scale},
                   {.x = 1});
        fp8::few_rows_by_ids(r, x, up.operand, apart.ids.view.with_row_count(count.view.buffer),
                             apart.hidden, form);
        fp8::few_rows_routed(r, x, up.operand,
                             {.logits = logits_t,
                              .bias = c.bias ? bias.view : TensorView{},
                              .options = c.options,
                              .ids = together.ids.view.with_row_count(count.view.buffer),
                              .weights = together.weights},
                             together.hidden, form);
    });
    const auto same = [&](const char* part, const TensorView& a, const TensorView& b) {
        const std::uint64_t present = c.count * a.num_elements() / c.rows;
        const auto expected = rig.read(a), actual = rig.read(b);
        for (std::uint64_t i = 0; i < actual.size(); ++i)
            if (i < present ? std::bit_cast<std::uint32_t>(actual[i]) !=
                                  std::bit_cast<std::uint32_t>(expected[i])
                            : !untouched(actual[i])) {
                check.that(part, false,
                           "element " + std::to_string(i) + " is " + std::to_string(actual[i]) +
                               ", not " + std::to_string(expected[i]));
                return;
            }
        check.that(part, true, "");
    };
    same("weights", apart.weights, together.weights);
    same("SwiGLU", apart.hidden, together.hidden);
    const auto expected = rig.read<std::int32_t>(apart.ids),
               actual = rig.read<std::int32_t>(together.ids);
    for (std::uint64_t s = 0; s < c.count * c.top_k; ++s)
        check.that("ids", actual[s] == expected[s],
                   "slot " + std::to_string(s) + " has " + std::to_string(actual[s]) + ", not " +
                       std::to_string(expected[s]));
}

} // namespace

void add_few_rows_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "few rows by weights", kNtCases, check_nt);
    add_table(checks, depth, "few rows by experts", kExpertsCases, check_experts);
    add_table(checks, depth, "few rows by a router's choice", kRoutedCases, check_routed);
}

} // namespace bellows::checks
