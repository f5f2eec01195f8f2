// SPDX-License-Identifier: MIT
#include "verify/checks/few_rows_rig.hpp"

#include "verify/reference/fp8.hpp"

#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <cmath>
#include <span>

namespace bellows::checks::few_rows {

using reference::to_double;
using reference::Vector;

namespace {

/// All codes but NaN, zeros and subnormal ones among them. count 0: one matrix without a batch.
FewRowsWeights code_weights(const OpRig& rig, Kind kind, std::uint64_t count, std::uint64_t n,
                            std::uint64_t k, std::optional<std::uint64_t> nan) {
    const fp8::Recipe recipe{fp8::Blocks::Blocks128, fp8::Format::E4M3,
                             kind == Kind::PowersOfTwo ? fp8::ScaleRule::PowerOfTwo
                                                       : fp8::ScaleRule::F32};
    const std::uint64_t matrices = std::max<std::uint64_t>(count, 1), row = round_up(k, 16),
                        blocks_n = div_up(n, 128), blocks_k = div_up(k, 128);
    reference::Random random(n * 31 + k);
    std::vector<std::uint8_t> codes(matrices * n * row);
    std::vector<float> scales(matrices * blocks_n * blocks_k);
    for (float& scale : scales)
        scale = kind == Kind::PowersOfTwo ? std::ldexp(1.0f, -static_cast<int>(random.below(6)) - 6)
                                          : static_cast<float>(random.uniform(0.001, 0.02));
    FewRowsWeights w;
    for (std::uint64_t m = 0; m < matrices; ++m)
        for (std::uint64_t i = 0; i < n; ++i)
            for (std::uint64_t j = 0; j < k; ++j) {
                auto code = static_cast<std::uint8_t>(random.below(256));
                code = (code & 0x7F) == 0x7F ? 0x01 : code;
                if (nan && m == 0 && i * k + j == *nan)
                    code = 0xFF;
                codes[(m * n + i) * row + j] = code;
                const float scale = scales[(m * blocks_n + i / 128) * blocks_k + j / 128];
                w.values.push_back(reference::fp8_value(reference::Fp8Format::E4M3, code) *
                                   static_cast<double>(scale));
            }
    w.codes = rig.workspace(round_up(codes.size(), 16));
    codes.resize(w.codes.size());
    w.scales = rig.workspace(scales.size() * 4);
    rig.device().upload(w.codes.view(), std::span<const std::uint8_t>(codes));
    rig.device().upload(w.scales.view().sub(0, scales.size() * 4), std::span<const float>(scales));
    w.operand = count == 0
                    ? fp8::make_quantized(w.codes.view(), w.scales.view(), recipe, {n, k})
                    : fp8::make_quantized(w.codes.view(), w.scales.view(), recipe, {count, n, k});
    return w;
}

} // namespace

FewRowsWeights make_weights(const OpRig& rig, DType act, Kind kind, std::uint64_t count,
                            std::uint64_t n, std::uint64_t k, std::optional<std::uint64_t> nan) {
    if (kind != Kind::Values)
        return code_weights(rig, kind, count, n, k, nan);
    const std::uint64_t matrices = std::max<std::uint64_t>(count, 1);
    const auto values = OpRig::random(act, matrices * n * k, 7);
    FewRowsWeights w;
    w.stored =
        count == 0 ? rig.tensor(act, {n, k}, values) : rig.tensor(act, {count, n, k}, values);
    w.operand = w.stored.view;
    w.values = to_double(values);
    return w;
}

Bounded dot(const Vector& x, std::uint64_t x_at, const Vector& w, std::uint64_t w_at,
            std::uint64_t k) {
    double sum = 0, magnitude = 0;
    for (std::uint64_t i = 0; i < k; ++i) {
        sum += x[x_at + i] * w[w_at + i];
        magnitude += std::abs(x[x_at + i] * w[w_at + i]);
    }
    return {sum, static_cast<double>(k + 16) * reference::kF32Epsilon * magnitude};
}

void compare(Check& check, const char* part, const std::vector<float>& actual,
             const std::vector<Bounded>& expected, DType storage) {
    Vector values;
    for (const Bounded& e : expected)
        values.push_back(e.value);
    const double relative =
        storage == DType::BF16 ? 1.01 * reference::kBf16Epsilon : reference::kF32Epsilon;
    check.elements(part, actual, values, {values.size()}, [&](std::size_t i, double value) {
        return 1.01 * expected[i].error + relative * std::abs(value) + 1e-37;
    });
}

} // namespace bellows::checks::few_rows
