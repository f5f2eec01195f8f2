// SPDX-License-Identifier: MIT
// Attention's parts to the codes of each head's values (fp8/latent_values.hpp) against f64.

#include "fp8/gemm_rig.hpp"

#include <bellows/fp8/latent_values.hpp>

#include <cmath>

namespace bellows {
namespace {

using namespace testing;

constexpr std::uint64_t kValues = 128;

struct Case {
    std::uint64_t rows, heads, latent;
    std::vector<std::uint32_t> counts; ///< of parts, by turns
    ScaleRule rule = ScaleRule::PowerOfTwo;
};

class Fp8LatentValues : public Fp8GemmTest {
protected:
    static void check(const Case& c) {
        SCOPED_TRACE(std::to_string(c.rows) + " rows, " + std::to_string(c.heads) + " heads of " +
                     std::to_string(c.latent));
        std::vector<std::uint32_t> table;
        std::uint32_t partials = 0;
        for (std::uint64_t row = 0; row < c.rows; ++row) {
            const std::uint32_t count = c.counts[row % c.counts.size()];
            table.insert(table.end(), {partials, count});
            partials += count > 1 ? count : 0;
        }
        const std::uint64_t parts = std::max(partials, 1u), stored = 2 * kValues;
        const auto sums = random(DType::BF16, c.rows * c.heads * c.latent, 1),
                   x = random(DType::F32, parts * c.heads * c.latent, 2),
                   logs = random(DType::F32, parts * c.heads, 3, -3.0f, 3.0f),
                   weights = random(DType::BF16, c.heads * stored * c.latent, 4);
        const OpTensor table_t = tensor(DType::U32, {c.rows, 2}, table),
                       sums_t = tensor(DType::BF16, {c.rows, c.heads, c.latent}, sums),
                       x_t = tensor(DType::F32, {parts, c.heads, c.latent}, x),
                       logs_t = tensor(DType::F32, {parts, c.heads}, logs),
                       weights_t = tensor(DType::BF16, {c.heads, stored, c.latent}, weights),
                       values_t = result(DType::F32, {c.rows, c.heads * kValues});
        const Recipe recipe{Blocks::Rows128, Format::E4M3, c.rule};
        const Buffer memory = workspace(fp8::quantized_bytes(recipe, {c.rows, c.heads * kValues}));
        const Quantized codes =
            fp8::make_quantized(memory.view(), recipe, {c.rows, c.heads * kValues});
        run([&](Recording& r) {
            fp8::latent_values(r, {table_t, x_t, logs_t}, sums_t,
                               ops::slice(weights_t, 1, kValues, kValues), codes);
            fp8::dequantize(r, codes, values_t);
        });
        const auto values = read<float>(values_t.view);
        for (std::uint64_t row = 0; row < c.rows; ++row)
            for (std::uint64_t head = 0; head < c.heads; ++head) {
                const std::vector<double> sum = combined(c, table, sums, x, logs, row, head);
                std::vector<double> expected(kValues, 0.0);
                double most = 0;
                for (std::uint64_t v = 0; v < kValues; ++v) {
                    const std::uint64_t at = (head * stored + kValues + v) * c.latent;
                    for (std::uint64_t k = 0; k < c.latent; ++k)
                        expected[v] += sum[k] * weights[at + k];
                    most = std::max(most, std::abs(expected[v]));
                }
                for (std::uint64_t v = 0; v < kValues; ++v) {
                    // Half a unit of a code's three bits, with what bf16 rounds before, and the
                    // smallest codes' of a block.
                    const double bound = std::abs(expected[v]) / 14 + most / 500 + 1e-6;
                    ASSERT_NEAR(values[row * c.heads * kValues + head * kValues + v], expected[v],
                                bound)
                        << row << ", " << head << ", " << v;
                }
            }
    }

    static std::vector<double> combined(const Case& c, const std::vector<std::uint32_t>& table,
                                        const std::vector<float>& sums, const std::vector<float>& x,
                                        const std::vector<float>& logs, std::uint64_t row,
                                        std::uint64_t head) {
        const std::uint32_t first = table[2 * row], count = table[2 * row + 1];
        std::vector<double> sum(c.latent, 0.0);
        if (count == 1)
            for (std::uint64_t k = 0; k < c.latent; ++k)
                sum[k] = sums[(row * c.heads + head) * c.latent + k];
        if (count <= 1)
            return sum;
        double total = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            const double power = std::exp2(logs[(first + i) * c.heads + head]);
            total += power;
            for (std::uint64_t k = 0; k < c.latent; ++k)
                sum[k] += power * x[((first + i) * c.heads + head) * c.latent + k];
        }
        for (double& s : sum)
            s /= total;
        return sum;
    }
};

TEST_F(Fp8LatentValues, AreThoseOfTheReference) {
    const Case cases[] = {
        {8, 16, 512, {16}},
        {1, 3, 128, {1}},
        {70, 4, 256, {2, 1, 0, 5, 37}},
        {33, 16, 512, {3, 1}, ScaleRule::F32},
        {100, 40, 384, {1, 2}},
    };
    for (const Case& c : cases) {
        const OpTensor sums = result(DType::BF16, {c.rows, c.heads, c.latent}),
                       weights = result(DType::BF16, {c.heads, kValues, c.latent});
        const Recipe recipe{Blocks::Rows128, Format::E4M3, c.rule};
        const Buffer memory = workspace(fp8::quantized_bytes(recipe, {c.rows, c.heads * kValues}));
        const Quantized codes =
            fp8::make_quantized(memory.view(), recipe, {c.rows, c.heads * kValues});
        const std::string lacking = fp8::why_not_latent_values(device(), sums, weights, codes);
        if (native()) {
            EXPECT_EQ(lacking, "");
            check(c);
        } else {
            EXPECT_NE(lacking, "");
        }
    }
}

TEST_F(Fp8LatentValues, RefuseOtherShapes) {
    const OpTensor sums = result(DType::BF16, {3, 2, 128}),
                   weights = result(DType::BF16, {2, 64, 128}), table = result(DType::U32, {3, 2}),
                   x = result(DType::F32, {1, 2, 128}), logs = result(DType::F32, {1, 2});
    const Recipe recipe = *kind(Blocks::Rows128).recipe;
    const Buffer memory = workspace(fp8::quantized_bytes(recipe, {3, 256}));
    const Quantized codes = fp8::make_quantized(memory.view(), recipe, {3, 256});
    const std::string lacking = fp8::why_not_latent_values(device(), sums, weights, codes);
    ASSERT_NE(lacking, "");
    expect_refused(
        [&](Recording& r) { fp8::latent_values(r, {table, x, logs}, sums, weights, codes); },
        {"fp8::latent_values", lacking});
}

} // namespace
} // namespace bellows
