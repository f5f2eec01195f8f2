// SPDX-License-Identifier: MIT
// Peaks and spread of packed operands: blocks of zeros count for nothing, others for what their
// scale is. The kernel runs on every device, the product that uses it does not.

#include "support/op_test.hpp"

#include <bellows/kernels/kernels.hpp>

#include <bit>

namespace bellows {
namespace {

constexpr std::uint32_t kOne = 0x3F800000, kNan = 0x7FC00000, kX = 130, kDepth = 520, kBlocks = 5;
constexpr std::uint32_t kLd = 528; // of either form, at least

std::uint32_t power(int exponent) {
    return static_cast<std::uint32_t>(127 + exponent) << 23;
}

/// An operand of kX by kDepth: codes by (x, k), scales by (x, block), or one of each tile's block.
struct Operand {
    std::vector<std::uint8_t> codes = std::vector<std::uint8_t>(kX * kDepth, 0x38);
    std::vector<std::uint32_t> scales = std::vector<std::uint32_t>(kX * kBlocks, kOne);
    bool one_scale = false;

    std::uint32_t scale(std::uint32_t x, std::uint32_t block) const {
        return scales[(one_scale ? x / 128 * 128 : x) * kBlocks + block];
    }
    void fill(std::uint32_t x, std::uint32_t block, std::uint8_t code) {
        for (std::uint32_t k = 128 * block; k < std::min(128 * block + 128, kDepth); ++k)
            codes[x * kDepth + k] = code;
    }
    bool zeros(std::uint32_t x, std::uint32_t block) const {
        for (std::uint32_t k = 128 * block; k < std::min(128 * block + 128, kDepth); ++k)
            if ((codes[x * kDepth + k] & 0x7F) != 0)
                return false;
        return true;
    }
    /// Of what decides: the x, or all of its tile.
    bool says_nothing(std::uint32_t x, std::uint32_t block) const {
        if (!one_scale)
            return zeros(x, block);
        for (std::uint32_t other = x / 128 * 128; other < std::min(x / 128 * 128 + 128, kX);
             ++other)
            if (!zeros(other, block))
                return false;
        return true;
    }
};

struct Packed {
    std::vector<std::uint32_t> scales, peaks, spread;
};

/// By the definition. Zeros near the peak may keep their scale.
Packed expected(const Operand& o) {
    Packed p{std::vector<std::uint32_t>(2 * kBlocks * 128, kOne),
             std::vector<std::uint32_t>(256, kOne), std::vector<std::uint32_t>(2, 0)};
    for (std::uint32_t x = 0; x < kX; ++x) {
        std::uint32_t peak = 0, spread = 0;
        for (std::uint32_t b = 0; b < kBlocks; ++b)
            if (o.scale(x, b) != kNan)
                peak = std::max(peak, o.scale(x, b));
        for (std::uint32_t b = 0; b < kBlocks; ++b) {
            std::uint32_t scale = o.scale(x, b);
            if (scale != kNan && (peak - scale) >> 23 > 8 && o.says_nothing(x, b))
                scale = peak;
            p.scales[(x / 128 * kBlocks + b) * 128 + x % 128] = scale;
            spread = scale == kNan ? spread : std::max(spread, (peak - scale) >> 23);
        }
        p.peaks[x] = peak;
        p.spread[x / 128] = std::max(p.spread[x / 128], spread);
    }
    return p;
}

class Fp8PackScales : public testing::OpTest {
protected:
    static Packed packed(const Operand& o, bool by_k) {
        std::vector<std::uint32_t> words(kLd * kLd / 4, 0);
        for (std::uint32_t x = 0; x < kX; ++x)
            for (std::uint32_t k = 0; k < kDepth; ++k) {
                const std::uint32_t at = by_k ? k * kLd + x : x * kLd + k;
                words[at / 4] |= std::uint32_t{o.codes[x * kDepth + k]} << (8 * (at % 4));
            }
        std::vector<std::uint32_t> source(256 * kBlocks, kNan);
        for (std::uint32_t x = 0; x < kX; ++x)
            for (std::uint32_t b = 0; b < kBlocks; ++b)
                source[o.one_scale ? x / 128 * kBlocks + b
                                   : (by_k ? b * 256 + x : x * kBlocks + b)] = o.scale(x, b);
        const testing::OpTensor codes = tensor(DType::U32, {words.size()}, words),
                                scales = tensor(DType::U32, {source.size()}, source),
                                to = result(DType::U32, {2 * kBlocks * 128}),
                                peaks = result(DType::U32, {256}), spread = result(DType::U32, {2});
        run([&](Recording& r) {
            r.dispatch(kernels::Fp8PackScales{.constants = {.by_k = by_k ? 1u : 0u},
                                              .group_offsets = codes.view.buffer,
                                              .source = scales.view.buffer,
                                              .codes = codes.view.buffer,
                                              .scales = to.view.buffer,
                                              .peaks = peaks.view.buffer,
                                              .spread = spread.view.buffer,
                                              .extent = kX,
                                              .batch_tiles = 2,
                                              .blocks = kBlocks,
                                              .x_shift = o.one_scale ? 7u : 0u,
                                              .stride_x = o.one_scale || !by_k ? kBlocks : 1u,
                                              .stride_block = o.one_scale || !by_k ? 1u : 256u,
                                              .ld16 = kLd / 16,
                                              .k = kDepth},
                       {2});
        });
        return {read<std::uint32_t>(to), read<std::uint32_t>(peaks), read<std::uint32_t>(spread)};
    }

    static void check(const Operand& o) {
        const Packed wanted = expected(o);
        for (const bool by_k : {false, true}) {
            SCOPED_TRACE(by_k ? "by k" : "by x");
            const Packed got = packed(o, by_k);
            EXPECT_EQ(got.spread, wanted.spread);
            EXPECT_EQ(got.peaks, wanted.peaks);
            EXPECT_EQ(got.scales, wanted.scales);
        }
    }
};

TEST_F(Fp8PackScales, BlocksOfZerosDoNotWidenTheSpread) {
    Operand o;
    for (std::uint32_t x = 0; x < kX; ++x)
        for (std::uint32_t b = 0; b < kBlocks; ++b)
            o.scales[x * kBlocks + b] = power(static_cast<int>((x * 7 + b * 3) % 6));
    for (std::uint32_t x = 0; x < kX; x += 3) {
        o.scales[x * kBlocks + x % kBlocks] = power(-22);
        o.fill(x, x % kBlocks, x % 2 == 0 ? 0x00 : 0x80);
    }
    o.scales[7 * kBlocks + 2] = kNan;
    EXPECT_EQ(expected(o).spread, (std::vector<std::uint32_t>{3, 3}));
    check(o);
    // One code, the last of its block, is enough; so is the last of the row.
    Operand other = o;
    other.codes[66 * kDepth + 255] = 0x01;
    EXPECT_EQ(expected(other).spread[0], 25u);
    check(other);
    other = o;
    other.codes[129 * kDepth + kDepth - 1] = 0x81;
    EXPECT_EQ(expected(other).spread[1], 25u);
    check(other);
}

TEST_F(Fp8PackScales, ABlockOfATileIsZeroWhereAllOfItIs) {
    Operand o;
    o.one_scale = true;
    for (std::uint32_t x = 0; x < kX; ++x) {
        o.scales[x * kBlocks + 1] = power(-22);
        o.fill(x, 1, 0);
    }
    EXPECT_EQ(expected(o).spread, (std::vector<std::uint32_t>{0, 0}));
    check(o);
    o.codes[127 * kDepth + 128] = 0x02;
    EXPECT_EQ(expected(o).spread, (std::vector<std::uint32_t>{22, 0}));
    check(o);
}

TEST_F(Fp8PackScales, NothingButZeros) {
    Operand o;
    std::fill(o.codes.begin(), o.codes.end(), std::uint8_t{0});
    std::fill(o.scales.begin(), o.scales.end(), power(-22));
    check(o);
}

} // namespace
} // namespace bellows
