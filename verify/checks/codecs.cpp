// SPDX-License-Identifier: MIT
// bf16 to f32 for all 65536 codes, and f32 to bf16 for every code, every rounding midpoint and the
// neighbours of both: what decides round to nearest even, overflow and denormals. Bit by bit.
#include "verify/checks/families.hpp"

#include <bellows/engine/ops.hpp>

#include <array>

namespace bellows::checks {

namespace {

constexpr std::uint64_t kCodes = 65536;

/// As bits, so that signed zeros and denormals count; every NaN is one.
std::uint32_t bits_of(float value) {
    return std::isnan(value) ? kUntouched : std::bit_cast<std::uint32_t>(value);
}

void check_bf16_decode(Check& check, const OpRig& rig) {
    check.begin_case("all 65536 codes");
    std::vector<std::uint16_t> codes(kCodes);
    std::vector<std::uint32_t> expected(kCodes);
    for (std::size_t i = 0; i < kCodes; ++i) {
        codes[i] = static_cast<std::uint16_t>(i);
        expected[i] = bits_of(reference::from_bf16(codes[i]));
    }
    const OpTensor from = rig.result(DType::BF16, {kCodes});
    const OpTensor to = rig.result(DType::F32, {kCodes});
    rig.device().upload(from.view.buffer, std::span<const std::uint16_t>(codes));
    rig.run([&](Recording& recording) { ops::cast(recording, from, to); });
    std::vector<std::uint32_t> actual;
    for (const float value : rig.read(to))
        actual.push_back(bits_of(value));
    check.exact("codes", std::move(actual), expected);
}

void check_bf16_encode(Check& check, const OpRig& rig) {
    constexpr std::array<std::uint32_t, 8> kLow = {0,      1,      0x7FFE, 0x7FFF,
                                                   0x8000, 0x8001, 0xFFFE, 0xFFFF};
    check.begin_case("8 values around each of 65536 codes");
    std::vector<float> values;
    std::vector<std::uint32_t> expected;
    for (std::uint32_t high = 0; high < kCodes; ++high)
        for (const std::uint32_t low : kLow) {
            values.push_back(std::bit_cast<float>(high << 16 | low));
            expected.push_back(bits_of(reference::from_bf16(reference::bf16_bits(values.back()))));
        }
    const OpTensor from = rig.result(DType::F32, {values.size()});
    const OpTensor to = rig.result(DType::BF16, {values.size()});
    rig.device().upload(from.view.buffer, std::span<const float>(values));
    rig.run([&](Recording& recording) { ops::cast(recording, from, to); });
    std::vector<std::uint16_t> codes(values.size());
    rig.device().download(to.view.buffer, std::span<std::uint16_t>(codes));
    std::vector<std::uint32_t> actual;
    for (const std::uint16_t code : codes)
        actual.push_back(bits_of(reference::from_bf16(code)));
    check.exact("codes", std::move(actual), expected);
}

/// Tails of vector loads: what stands behind the tensor stays.
void check_cast_tails(Check& check, const OpRig& rig) {
    for (const std::uint64_t count : {1u, 2u, 3u, 5u, 1023u, 4097u}) {
        check.begin_case(std::to_string(count) + " elements");
        const auto values = reference::random_f32(count, count);
        const OpTensor from = rig.tensor(DType::F32, {count}, values);
        const OpTensor to = rig.result(DType::BF16, {count + 8});
        const OpTensor back = rig.result(DType::F32, {count + 8});
        const TensorView head = to.view.rows(0, count), back_head = back.view.rows(0, count);
        rig.run([&](Recording& recording) {
            ops::cast(recording, from, head);
            ops::cast(recording, head, back_head);
        });
        std::vector<float> expected;
        for (const float value : values)
            expected.push_back(reference::round_to_bf16(value));
        check.exact("there", rig.read(head), expected);
        check.exact("back", rig.read(back_head), expected);
        check.untouched("there", rig.outside(to, head));
        check.untouched("back", rig.outside(back, back_head));
    }
}

} // namespace

void add_codec_checks(std::vector<OpCheck>& checks, Depth) {
    checks.push_back({"codecs", "bf16 to f32", check_bf16_decode});
    checks.push_back({"codecs", "f32 to bf16", check_bf16_encode});
    checks.push_back({"codecs", "cast tails", check_cast_tails});
}

} // namespace bellows::checks
