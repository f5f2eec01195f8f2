// SPDX-License-Identifier: MIT
// The host's codecs and scales against the definition.

#include "fp8/codes.hpp"

#include <bellows/base/error.hpp>
#include <bellows/fp8/recipe.hpp>

#include <gtest/gtest.h>

#include <cstring>

namespace bellows {
namespace {

using fp8::Blocks;
using fp8::Format;
using fp8::ScaleRule;
using test::kFormats;
using test::reference_format;

std::uint32_t bits_of(float value) {
    return std::bit_cast<std::uint32_t>(value);
}

reference::Fp8Rule reference_rule(ScaleRule rule) {
    return rule == ScaleRule::F32 ? reference::Fp8Rule::F32 : reference::Fp8Rule::PowerOfTwo;
}

TEST(Fp8Format, DecodesAllCodes) {
    for (const Format format : kFormats)
        for (int code = 0; code < 256; ++code) {
            const auto byte = static_cast<std::uint8_t>(code);
            const double expected = reference::fp8_value(reference_format(format), byte);
            const float actual = fp8::decode(format, byte);
            if (std::isnan(expected)) {
                EXPECT_TRUE(std::isnan(actual)) << code;
            } else {
                EXPECT_EQ(bits_of(actual), bits_of(static_cast<float>(expected))) << code;
            }
        }
}

TEST(Fp8Format, KnowsItsLimits) {
    EXPECT_EQ(fp8::decode(Format::E4M3, 0x7E), 448);
    EXPECT_EQ(fp8::decode(Format::E4M3, 0x01), std::ldexp(1.0f, -9));
    EXPECT_EQ(fp8::decode(Format::E4M3, 0x08), std::ldexp(1.0f, -6));
    EXPECT_EQ(fp8::decode(Format::E5M2, 0x7B), 57344);
    EXPECT_EQ(fp8::decode(Format::E5M2, 0x01), std::ldexp(1.0f, -16));
    EXPECT_EQ(fp8::decode(Format::E5M2, 0x04), std::ldexp(1.0f, -14));
    EXPECT_EQ(fp8::decode(Format::E5M2, 0xFC), -std::numeric_limits<float>::infinity());
    for (const Format format : kFormats)
        EXPECT_EQ(fp8::largest(format), fp8::decode(format, format == Format::E4M3 ? 0x7E : 0x7B));
}

TEST(Fp8Format, EncodesToTheNearestAndSaturates) {
    for (const Format format : kFormats)
        for (const float value : test::critical_values(format))
            ASSERT_EQ(fp8::encode(format, value),
                      reference::fp8_nearest(reference_format(format), value))
                << to_string(format) << " of " << value << ", bits " << std::hex << bits_of(value);
}

TEST(Fp8Format, KeepsEveryValueAndTheSignOfZero) {
    for (const Format format : kFormats) {
        for (int code = 0; code < 256; ++code) {
            const float value = fp8::decode(format, static_cast<std::uint8_t>(code));
            if (std::isfinite(value)) {
                EXPECT_EQ(fp8::encode(format, value), code);
            }
        }
        EXPECT_EQ(fp8::encode(format, -0.0f), 0x80);
        EXPECT_EQ(fp8::encode(format, std::numeric_limits<float>::infinity()),
                  fp8::encode(format, fp8::largest(format)));
        EXPECT_EQ(fp8::encode(format, std::nanf("")), fp8::kNanCode);
        EXPECT_EQ(fp8::encode(format, -std::nanf("")), fp8::kNanCode);
    }
}

TEST(Fp8Format, Ue8m0) {
    for (int code = 0; code < 255; ++code) {
        const auto byte = static_cast<std::uint8_t>(code);
        EXPECT_EQ(fp8::decode_ue8m0(byte), std::ldexp(1.0f, code - 127));
        EXPECT_EQ(fp8::encode_ue8m0(fp8::decode_ue8m0(byte)), byte);
        const float above =
            std::nextafter(fp8::decode_ue8m0(byte), std::numeric_limits<float>::infinity());
        EXPECT_EQ(fp8::encode_ue8m0(above), std::min(code + 1, 254)) << code;
        if (code > 0) {
            const float below = std::nextafter(fp8::decode_ue8m0(byte), 0.0f);
            EXPECT_EQ(fp8::encode_ue8m0(below), byte) << code;
        }
    }
    EXPECT_TRUE(std::isnan(fp8::decode_ue8m0(0xFF)));
    EXPECT_EQ(fp8::encode_ue8m0(0), 0);
    EXPECT_EQ(fp8::encode_ue8m0(std::numeric_limits<float>::denorm_min()), 0);
    EXPECT_EQ(fp8::encode_ue8m0(std::numeric_limits<float>::infinity()), 0xFE);
    EXPECT_EQ(fp8::encode_ue8m0(std::nanf("")), 0xFF);
}

TEST(Fp8Scale, IsThePrescribedOne) {
    for (const Format format : kFormats)
        for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32})
            for (const float amax : test::critical_maxima()) {
                const float expected = reference::fp8_block_scale(reference_format(format),
                                                                  reference_rule(rule), amax);
                const float actual = fp8::block_scale(format, rule, amax);
                if (std::isnan(expected)) {
                    EXPECT_TRUE(std::isnan(actual));
                    EXPECT_TRUE(std::isnan(fp8::inverse_scale(rule, actual)));
                    continue;
                }
                ASSERT_EQ(bits_of(actual), bits_of(expected)) << to_string(rule) << " of " << amax;
                const float inverse = fp8::inverse_scale(rule, actual);
                EXPECT_EQ(bits_of(inverse),
                          bits_of(reference::fp8_inverse_scale(reference_rule(rule), expected)));
                EXPECT_NEAR(static_cast<double>(inverse) * actual, 1, 0x1p-23);
            }
}

TEST(Fp8Scale, LetsTheLargestValueFit) {
    for (const Format format : kFormats)
        for (const float amax : test::critical_maxima()) {
            if (!(amax >= 1e-4f) || amax > 2e38f) // smaller: the floor; larger: saturates
                continue;
            const double scale = fp8::block_scale(format, ScaleRule::PowerOfTwo, amax);
            EXPECT_LE(amax, scale * fp8::largest(format));
            EXPECT_GT(amax, scale / 2 * fp8::largest(format));
            const float f32_scale = fp8::block_scale(format, ScaleRule::F32, amax);
            EXPECT_EQ(fp8::encode(format, amax * fp8::inverse_scale(ScaleRule::F32, f32_scale)),
                      fp8::encode(format, fp8::largest(format)));
        }
}

TEST(Fp8Scale, PowersOfTwoKeepEveryValueExactInBf16) {
    for (const Format format : kFormats)
        for (const float amax : {0.0f, std::numeric_limits<float>::max()}) {
            const float scale = fp8::block_scale(format, ScaleRule::PowerOfTwo, amax);
            for (int code = 0; code < 256; ++code) {
                const float value = fp8::decode(format, static_cast<std::uint8_t>(code)) * scale;
                if (!std::isfinite(fp8::decode(format, static_cast<std::uint8_t>(code))))
                    continue;
                EXPECT_TRUE(value == 0 || std::isnormal(value)) << code;
                EXPECT_EQ(bits_of(value) & 0xFFFFu, 0u) << code;
            }
        }
}

TEST(Fp8Shapes, FollowTheRecipe) {
    const auto extents = [](Blocks blocks, std::initializer_list<std::uint64_t> of,
                            std::uint64_t groups = 0) {
        const fp8::Shape shape = fp8::scales_shape({.blocks = blocks}, of, groups);
        return std::vector<std::uint64_t>(shape.extent.begin(), shape.extent.begin() + shape.rank);
    };
    using V = std::vector<std::uint64_t>;
    EXPECT_EQ(extents(Blocks::Rows128, {5, 129}), (V{5, 2}));
    EXPECT_EQ(extents(Blocks::Columns128, {129, 7}), (V{2, 7}));
    EXPECT_EQ(extents(Blocks::Columns128, {129, 7}, 3), (V{4, 7}));
    EXPECT_EQ(extents(Blocks::Blocks128, {3, 256, 127}), (V{3, 2, 1}));
    EXPECT_EQ(extents(Blocks::PerTensor, {3, 256, 127}), (V{1}));
    EXPECT_EQ(extents(Blocks::MX32, {2, 33}), (V{2, 2}));
    EXPECT_EQ(fp8::codes_shape({3, 20}).stride[0], 32u);
    EXPECT_EQ(fp8::codes_bytes({3, 20}), 96u);
    EXPECT_EQ(fp8::scales_bytes({.blocks = Blocks::MX32}, {3, 33}), 16u);
    EXPECT_EQ(fp8::scales_bytes({}, {4, 256}), 32u);
    EXPECT_EQ(fp8::quantized_bytes({}, {4, 256}), 4u * 256u + 32u);
    const fp8::Recipe columns{.blocks = Blocks::Columns128};
    const fp8::Shape transposed = fp8::transposed_shape(columns, {300, 7});
    EXPECT_EQ(transposed.rank, 2u);
    EXPECT_EQ(transposed.extent[0], 7u);
    EXPECT_EQ(transposed.extent[1], 384u);
    EXPECT_EQ(transposed.stride[0], 384u);
    EXPECT_EQ(fp8::transposed_shape(columns, {300, 7}, 4).extent[1], 128u * 6);
    EXPECT_EQ(fp8::transposed_bytes(columns, {300, 7}), 7u * 384 + 3 * 8 * 4);
    EXPECT_EQ(fp8::transposed_bytes(columns, {300, 7}, 4), 7u * 768 + 6 * 8 * 4);
    EXPECT_EQ(fp8::transposed_bytes(columns, {1ull << 20, 8192}),
              (1ull << 33) + 8192ull * 8192 * 4);
    EXPECT_THROW(fp8::transposed_shape({}, {4, 4}), Error);
    EXPECT_THROW(fp8::transposed_shape(columns, {2, 4, 4}), Error);
    EXPECT_THROW(fp8::scales_shape({}, {4}), Error);
    EXPECT_THROW(fp8::scales_shape({}, {4, 4}, 2), Error);
    EXPECT_THROW(fp8::scales_shape({.blocks = Blocks::MX32, .rule = ScaleRule::F32}, {4, 4}),
                 Error);
}

} // namespace
} // namespace bellows
