// SPDX-License-Identifier: MIT
// The check of bench_moe_layer accepts what the layer computes, and finds one wrong element in any
// of its results.

#include "moe_layer/layer.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <set>

namespace bellows::bench {
namespace {

class BenchMoeLayer : public ::testing::TestWithParam<MoeLayerCase> {
protected:
    static std::unique_ptr<Device> poisoned_device() {
        DeviceOptions options;
        options.poison_freed_memory = true;
        return Device::create(DeviceOptions::from_environment(options));
    }
    fp8::Choice choice() const {
        return GetParam().fp8 ? fp8::usual_choice(*device_) : fp8::usual_choice_of_bf16(*device_);
    }
    /// The word at an element, another one for as long as check() looks.
    std::string check_with(const MoeLayer& layer, const TensorView& view, std::uint64_t element,
                           std::uint32_t flipped) {
        const std::uint64_t at = element * size_of(view.dtype) / 4 * 4;
        const BufferView word = view.buffer.sub(at, 4);
        std::uint32_t before = 0;
        device_->download(word, std::span(&before, 1));
        const std::uint32_t after = before ^ flipped;
        device_->upload(word, std::span(&after, 1));
        const std::string wrong = layer.check();
        device_->upload(word, std::span(&before, 1));
        return wrong;
    }

    std::unique_ptr<Device> device_ = poisoned_device();
};

TEST_P(BenchMoeLayer, OnlyARightResultPasses) {
    const MoeLayerShape& s = GetParam().shape;
    const MoeLayer layer(*device_, GetParam(), choice());
    EXPECT_EQ(layer.workload().verify(), "");
    EXPECT_EQ(layer.check(), "");
    const MoeLayerTensors& t = layer.tensors();
    std::vector<std::int32_t> rows(s.slots());
    device_->download(t.layout.slot_to_row.buffer.sub(0, 4 * rows.size()), std::span(rows));
    const auto row = static_cast<std::uint64_t>(rows.back()); // of the last token
    const auto last_of = [](const TensorView& view, std::uint64_t at) {
        return at * view.stride[0] + view.extent[1] - 1;
    };
    // The last of a row is the upper half of its word; one bit of its exponent.
    constexpr std::uint32_t kBf16 = 1u << 24, kCode = 1u << 28, kF32 = 1u << 24;
    const auto expect_wrong = [&](const char* what, const fp8::Operand& view, std::uint64_t at) {
        const bool codes = view.quantized.has_value();
        EXPECT_NE(check_with(layer, view.values, last_of(view.values, at), codes ? kCode : kBf16),
                  "")
            << what;
        if (codes) {
            const TensorView& scales = view.quantized->scales;
            EXPECT_NE(check_with(layer, scales, last_of(scales, at), kF32), "")
                << "scale of " << what;
        }
    };
    expect_wrong("y", t.y, s.tokens - 1);
    expect_wrong("y", t.y, 0);
    expect_wrong("result", t.results, row);
    expect_wrong("swiglu", t.hidden, row);
    expect_wrong("gate and up", t.gate_up, row);
    if (t.q)
        expect_wrong("codes", *t.q, s.tokens - 1);
    else
        expect_wrong("rows", t.rows, row);
    EXPECT_NE(check_with(layer, t.layout.slot_to_row, s.slots() - 1, 1), "") << "place";
    EXPECT_EQ(layer.check(), "") << "all as it was";
}

TEST_P(BenchMoeLayer, TokensHaveDifferentExpertsAndWeightsOfOne) {
    const MoeLayerShape& s = GetParam().shape;
    const MoeLayerRouting routing(GetParam());
    ASSERT_EQ(routing.ids.size(), s.slots());
    std::vector<std::uint64_t> counts(s.experts);
    for (std::uint64_t t = 0; t < s.tokens; ++t) {
        std::set<std::int32_t> chosen;
        double sum = 0;
        for (std::uint64_t slot = t * s.top_k; slot < (t + 1) * s.top_k; ++slot) {
            chosen.insert(routing.ids[slot]);
            sum += static_cast<double>(routing.weights[slot]);
            ++counts.at(static_cast<std::size_t>(routing.ids[slot]));
        }
        EXPECT_EQ(chosen.size(), s.top_k);
        EXPECT_NEAR(sum, 1, 1e-6);
    }
    if (GetParam().skew >= 2) {
        EXPECT_GT(counts.front(), counts.back());
    }
}

INSTANTIATE_TEST_SUITE_P(Cases, BenchMoeLayer,
                         ::testing::Values(MoeLayerCase{{24, 256, 5, 136, 3}, true},
                                           MoeLayerCase{{24, 256, 5, 136, 3}, false},
                                           MoeLayerCase{{40, 136, 6, 256, 2}, true, 2},
                                           MoeLayerCase{{1, 8, 1, 8, 1}, true},
                                           MoeLayerCase{{1, 8, 1, 8, 1}, false}),
                         [](const auto& c) {
                             return "of" + name_of(c.param.shape) + (c.param.fp8 ? "Fp8" : "Bf16");
                         });

} // namespace
} // namespace bellows::bench
