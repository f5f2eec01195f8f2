// SPDX-License-Identifier: MIT
// Dense products by Variant::Direct, of bf16 operands straight from memory.

#include "fp8/dense_rig.hpp"

#include <limits>

namespace bellows {
namespace {

using namespace testing;

class Fp8DirectGemm : public Fp8DenseTest {};

TEST_F(Fp8DirectGemm, DirectProducts) {
    const bool cpu = device().info().is_cpu; // whose compiler takes half a minute for a kernel
    int number = 0;
    for (const fp8::Way& way : direct_on_units()) {
        way_ = way;
        for (const Shape& s : {Shape{16, 32, 128},
                               {35, 66, 512},
                               {1, 1, 8},
                               {17, 33, 136},
                               {70, 130, 200},
                               {5, 40, 72, 3},
                               {260, 272, 1000}}) {
            if (cpu && number > 0 && s.k % 128 == 0)
                continue;
            SCOPED_TRACE(std::to_string(s.m) + " x " + std::to_string(s.n) + " x " +
                         std::to_string(s.k) + ", tile " + std::to_string(number));
            const Input a = make_a(GemmForm::NT, kBf16Kind, s),
                        b = make_b(GemmForm::NT, kBf16Kind, s);
            if (!cpu || number == 2)
                check(GemmForm::NT, a, b, s, DType::BF16);
            if (!cpu || number != 2)
                check(GemmForm::NT, a, b, s, DType::F32, true);
            if (!cpu || number == 2) // the kernel of D overwritten
                check(GemmForm::NT, a, b, s, DType::BF16, true);
        }
        ++number;
    }
}

/// Of every tile, whatever the other rows and the place of D, again and again.
TEST_F(Fp8DirectGemm, DirectProductsHaveTheSameBits) {
    const Shape s{37, 64, 328};
    std::vector<float> all;
    for (const fp8::Way& way : direct_on_units()) {
        way_ = way;
        const Input a = make_a(GemmForm::NT, kBf16Kind, s), b = make_b(GemmForm::NT, kBf16Kind, s);
        const auto bits = [&](std::uint64_t first, const OpTensor& d) {
            const TensorView rows = a.operand->values.rows(first, d.view.extent[0]);
            run([&](Recording& r) { fp8::gemm_nt(r, rows, *b.operand, d, false, {}, way_); });
            return read(d.view);
        };
        if (all.empty()) {
            all = bits(0, padded(DType::F32, {s.m, s.n}));
            EXPECT_EQ(bits(0, result(DType::F32, {s.m, s.n})), all) << "where rows are aligned";
        }
        EXPECT_EQ(bits(0, padded(DType::F32, {s.m, s.n})), all);
        for (const std::uint64_t row : {0u, 16u, 36u}) {
            const auto one = bits(row, padded(DType::F32, {1, s.n}));
            EXPECT_TRUE(std::equal(one.begin(), one.end(),
                                   all.begin() + static_cast<std::ptrdiff_t>(row * s.n)))
                << "row " << row;
        }
    }
}

/// What is read instead of k that do not exist counts as 0.
TEST_F(Fp8DirectGemm, DirectProductsOfInfinities) {
    const Shape s{20, 40, 136};
    const float infinity = std::numeric_limits<float>::infinity();
    auto x = random(DType::BF16, s.m * s.k, 1, 0.5, 1),
         w = random(DType::BF16, s.n * s.k, 2, 0.5, 1);
    x[3 * s.k + 135] = infinity;
    w[7 * s.k + 130] = infinity;
    for (const fp8::Way& way : direct_on_units()) {
        way_ = way;
        const Input a = input(kBf16Kind, {s.m, s.k}, x), b = input(kBf16Kind, {s.n, s.k}, w);
        const OpTensor d = padded(DType::F32, {s.m, s.n});
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        run([&](Recording& r) { record(r, GemmForm::NT, a, b, d, false, scratch); });
        const auto values = read(d.view);
        for (std::uint64_t i = 0; i < values.size(); ++i)
            ASSERT_EQ(values[i] == infinity, i / s.n == 3 || i % s.n == 7)
                << i / s.n << ", " << i % s.n << ": " << values[i];
    }
}

TEST_F(Fp8DirectGemm, DirectProductsSayWhatTheyDoNotServe) {
    const auto ways = direct_on_units();
    if (ways.empty())
        return;
    way_ = ways.front();
    const Shape s{16, 32, 64};
    const Input a = make_a(GemmForm::NT, kBf16Kind, s), b = make_b(GemmForm::NT, kBf16Kind, s);
    const OpTensor d = padded(DType::F32, {s.m, s.n});
    const auto refused = [&](const Operand& x, const Operand& y, const std::string& word) {
        const Buffer scratch = workspace_for(x, y);
        expect_refused([&](Recording& r) { fp8::gemm_nt(r, x, y, d, false, scratch.view(), way_); },
                       {"fp8::gemm_nt", "direct variant does not serve", word});
    };
    refused(*make_a(GemmForm::NT, kind(Blocks::Rows128), s).operand, *b.operand, "bf16 operands");
    refused(*a.operand, *make_b(GemmForm::NT, kF32Kind, s).operand, "bf16 operands");
    const Shape odd{16, 32, 60};
    refused(*make_a(GemmForm::NT, kBf16Kind, odd).operand,
            *make_b(GemmForm::NT, kBf16Kind, odd).operand, "a is bf16 [16, 60]");
    TensorView shifted = b.operand->values;
    shifted.buffer = shifted.buffer.sub(2, shifted.buffer.bytes - 2);
    refused(*a.operand, shifted, "multiples of 16 bytes");
    way_.tile.fragments_n = 64;
    refused(*a.operand, *b.operand, "the tile is none");
}

} // namespace
} // namespace bellows
