// SPDX-License-Identifier: MIT
// Dense products whose weights are streamed, for few rows.

#include "fp8/dense_rig.hpp"

#include <limits>

namespace bellows {
namespace {

using namespace testing;

class Fp8StreamedGemm : public Fp8DenseTest {};

TEST_F(Fp8StreamedGemm, StreamedWeights) {
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

TEST_F(Fp8StreamedGemm, StreamedWeightsOnMatrixUnits) {
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

TEST_F(Fp8StreamedGemm, StreamedNaNsMeetTheirRowsAndColumnsAlone) {
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
TEST_F(Fp8StreamedGemm, StreamedRowsHaveTheSameBitsAmongOthers) {
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

} // namespace
} // namespace bellows
