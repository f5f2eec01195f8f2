// SPDX-License-Identifier: MIT
// One dispatch from a layer's values to its experts (fp8/route.hpp) against the ops that it stands
// for. Sums have another order there, so that codes may differ by one and near scores may change
// places.

#include "fp8/gemm_rig.hpp"

#include <bellows/fp8/fused.hpp>
#include <bellows/fp8/route.hpp>

namespace bellows {
namespace {

using namespace testing;

struct Case {
    std::uint64_t tokens, hidden, experts, top_k;
    ops::RouterOptions options = {};
    std::uint32_t shared = 0;
    bool bias = false;
    std::uint64_t there = UINT64_MAX;
    DType gain = DType::F32;
    ScaleRule rule = ScaleRule::PowerOfTwo;
};

constexpr auto kSoftmax = ops::RouterOptions::Score::Softmax;
const Case kCases[] = {
    {8, 2048, 64, 6, {.score = kSoftmax, .normalise = false}, 2},
    {1, 256, 5, 5},
    {33, 7168, 256, 8, {.groups = 8, .group_top_k = 4, .route_scale = 2.5f}, 1, true},
    {40,
     512,
     24,
     4,
     {.groups = 6, .group_top_k = 2, .group_score_top = 1},
     0,
     false,
     17,
     DType::BF16},
    {256, 1024, 70, 3, {.score = kSoftmax}, 0, true, UINT64_MAX, DType::BF16, ScaleRule::F32},
};

class Fp8Route : public Fp8GemmTest {
protected:
    static void check(const Case& c) {
        SCOPED_TRACE(std::to_string(c.tokens) + " tokens of " + std::to_string(c.hidden) +
                     ", top " + std::to_string(c.top_k) + " of " + std::to_string(c.experts));
        const std::uint64_t columns = c.top_k + c.shared, there = std::min(c.there, c.tokens);
        const OpTensor x = tensor(DType::BF16, {c.tokens, c.hidden},
                                  random(DType::BF16, c.tokens * c.hidden, 1)),
                       gain = tensor(c.gain, {c.hidden}, random(c.gain, c.hidden, 2, 0.5f, 1.5f)),
                       gate = tensor(DType::BF16, {c.experts, c.hidden},
                                     random(DType::BF16, c.experts * c.hidden, 3, -0.05f, 0.05f)),
                       bias = tensor(DType::F32, {c.experts},
                                     random(DType::F32, c.experts, 4, -0.1f, 0.1f)),
                       count =
                           tensor(DType::U32, {1},
                                  std::vector<std::uint32_t>{static_cast<std::uint32_t>(there)});
        const Recipe recipe{Blocks::Rows128, Format::E4M3, c.rule};
        const Buffer wanted_memory = workspace(fp8::quantized_bytes(recipe, {c.tokens, c.hidden})),
                     actual_memory = workspace(fp8::quantized_bytes(recipe, {c.tokens, c.hidden}));
        const Quantized wanted =
                            fp8::make_quantized(wanted_memory.view(), recipe, {c.tokens, c.hidden}),
                        actual =
                            fp8::make_quantized(actual_memory.view(), recipe, {c.tokens, c.hidden});
        const OpTensor norm = result(DType::BF16, {c.tokens, c.hidden}),
                       rms = result(DType::F32, {c.tokens}),
                       logits = result(DType::F32, {c.tokens, c.experts}),
                       scores = result(DType::F32, {c.tokens, c.experts}),
                       wanted_ids = result(DType::I32, {c.tokens, c.top_k}),
                       wanted_weights = result(DType::F32, {c.tokens, c.top_k}),
                       ids = result(DType::I32, {c.tokens, columns}),
                       weights = result(DType::F32, {c.tokens, columns}),
                       wanted_values = result(DType::F32, {c.tokens, c.hidden}),
                       values = result(DType::F32, {c.tokens, c.hidden});
        const TensorView biases = c.bias ? bias.view : TensorView{};
        const fp8::Route route{.x = c.there < c.tokens ? x.view.with_row_count(count.view.buffer)
                                                       : x.view,
                               .gain = gain,
                               .eps = 1e-5f,
                               .gate = gate,
                               .bias = biases,
                               .options = c.options,
                               .shared = c.shared};
        run([&](Recording& r) {
            fp8::rmsnorm(r, x, gain, wanted, rms, route.eps, norm);
            ops::gemm_nt(r, norm, gate, logits);
            ops::router_forward(r, logits, biases, scores, wanted_ids, wanted_weights, c.options);
            fp8::route(r, route, actual, ids, weights);
            fp8::dequantize(r, wanted, wanted_values);
            fp8::dequantize(r, actual, values);
        });
        const auto y = read<float>(values), w = read<float>(wanted_values);
        std::uint64_t different = 0;
        for (std::uint64_t i = 0; i < there * c.hidden; ++i) {
            different += std::abs(y[i] - w[i]) > 1e-5f * std::abs(w[i]); // scales may differ
            ASSERT_NEAR(y[i], w[i], std::abs(w[i]) / 7 + 1e-2) << i;     // one code
        }
        EXPECT_LE(different, there * c.hidden / 200 + 2);
        const auto chosen = read<int>(ids), expected = read<int>(wanted_ids);
        const auto of_chosen = read<float>(weights), of_expected = read<float>(wanted_weights);
        std::uint64_t others = 0;
        for (std::uint64_t i = 0; i < there * columns; ++i) {
            const std::uint64_t token = i / columns, k = i % columns;
            if (k >= c.top_k) {
                ASSERT_EQ(chosen[i], static_cast<int>(c.experts + k - c.top_k)) << i;
                ASSERT_EQ(of_chosen[i], 1) << i;
                continue;
            }
            const float wanted_weight = of_expected[token * c.top_k + k];
            others += chosen[i] != expected[token * c.top_k + k];
            ASSERT_NEAR(of_chosen[i], wanted_weight, 2e-3 * std::abs(wanted_weight) + 1e-5) << i;
        }
        EXPECT_LE(others, there * columns / 50);
        for (std::uint64_t i = there * columns; i < c.tokens * columns; ++i)
            ASSERT_TRUE(untouched(of_chosen[i])) << i;
    }
};

TEST_F(Fp8Route, DoesWhatItsOpsDo) {
    for (const Case& c : kCases) {
        const fp8::Route route{.x = result(DType::BF16, {c.tokens, c.hidden}),
                               .gain = result(c.gain, {c.hidden}),
                               .gate = result(DType::BF16, {c.experts, c.hidden}),
                               .options = c.options};
        const std::string lacking = fp8::why_not_route(device(), route, c.top_k);
        if (native()) {
            EXPECT_EQ(lacking, "");
            check(c);
        } else {
            EXPECT_NE(lacking, "");
        }
    }
}

TEST_F(Fp8Route, SaysWhatIsAgainstIt) {
    const OpTensor x = result(DType::BF16, {3, 264}), gain = result(DType::F32, {264}),
                   gate = result(DType::BF16, {4, 264}), ids = result(DType::I32, {3, 2}),
                   weights = result(DType::F32, {3, 2});
    const Buffer memory = workspace(fp8::quantized_bytes(*kind(Blocks::Rows128).recipe, {3, 264}));
    const Quantized codes =
        fp8::make_quantized(memory.view(), *kind(Blocks::Rows128).recipe, {3, 264});
    const fp8::Route route{.x = x, .gain = gain, .gate = gate, .options = {}};
    const std::string lacking = fp8::why_not_route(device(), route, 2);
    ASSERT_NE(lacking, "");
    expect_refused([&](Recording& r) { fp8::route(r, route, codes, ids, weights); },
                   {"fp8::route", lacking});
}

} // namespace
} // namespace bellows
