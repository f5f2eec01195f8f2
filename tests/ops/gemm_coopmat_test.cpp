// SPDX-License-Identifier: MIT
// The cooperative-matrix GEMM kernels on every device that enumerates a matrix row they serve,
// against f64 products of the operands as the matrix units see them. A device without such a row
// must say so.

#include "support/compare.hpp"
#include "support/test_device.hpp"

#include <bellows/kernels/kernels.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace bellows {
namespace {

/// A matrix row of the device, f16 operands and f32 sums, and the tile it is used with.
struct MatrixRow {
    std::uint32_t size = 16; ///< m = n = k
    kernels::GemmCoopmatNt::Constants constants;
};

std::optional<MatrixRow> matrix_row(const Device& device) {
    MatrixRow row;
    if (device.has_feature("coopmat_f16_f32_16x16x16") && device.info().subgroup_size == 32)
        return row;
    if (!device.has_feature("coopmat_f16_f32_8x8x8") || device.info().subgroup_size != 8)
        return std::nullopt;
    row.size = 8;
    row.constants.local_size = 32;
    row.constants.mma_m = row.constants.mma_n = row.constants.mma_k = 8;
    row.constants.fragments_m = row.constants.fragments_n = 2;
    row.constants.warps_m = row.constants.warps_n = 2;
    row.constants.block_k = 16;
    return row;
}

struct Shape {
    std::uint64_t m, n, k;
};

template <class Kernel>
void check(Device& device, const MatrixRow& row, const Shape& s, bool a_rows_are_k,
           bool b_rows_are_k) {
    // Small multiples of 1/8 are exact in f16.
    const auto exact = [](std::uint64_t count, std::uint64_t seed) {
        std::vector<float> values = test::random_f32(count, seed);
        for (float& value : values)
            value = std::round(value * 8) / 8;
        return values;
    };
    const auto a = exact(s.m * s.k, 1), b = exact(s.n * s.k, 2);
    Buffer device_a(device, {.name = "a", .bytes = a.size() * 4});
    Buffer device_b(device, {.name = "b", .bytes = b.size() * 4});
    Buffer device_d(device, {.name = "d", .bytes = s.m * s.n * 4});
    device.upload(device_a.view(), std::span<const float>(a));
    device.upload(device_b.view(), std::span<const float>(b));

    Kernel kernel;
    kernel.variant = Kernel::Variant::f16_f32_f32_f32;
    const auto& c = row.constants;
    const std::uint32_t aligned = s.m % 8 == 0 && s.n % 8 == 0 && s.k % 8 == 0 ? 1 : 0;
    kernel.constants = {c.local_size,  aligned,       c.mma_m,   c.mma_n,   c.mma_k,
                        c.fragments_m, c.fragments_n, c.warps_m, c.warps_n, c.block_k};
    kernel.a = device_a.view();
    kernel.b = device_b.view();
    kernel.d = device_d.view();
    kernel.m = static_cast<std::uint32_t>(s.m);
    kernel.n = static_cast<std::uint32_t>(s.n);
    kernel.k = static_cast<std::uint32_t>(s.k);
    kernel.lda = static_cast<std::uint32_t>(a_rows_are_k ? s.m : s.k);
    kernel.ldb = static_cast<std::uint32_t>(b_rows_are_k ? s.n : s.k);
    kernel.ldd = static_cast<std::uint32_t>(s.n);
    kernel.alpha = 1;
    const std::uint64_t block_m = c.mma_m * c.fragments_m * c.warps_m;
    const std::uint64_t block_n = c.mma_n * c.fragments_n * c.warps_n;
    Recording recording(device, QueueRole::Compute, "gemm");
    recording.dispatch(kernel, {static_cast<std::uint32_t>((s.m + block_m - 1) / block_m),
                                static_cast<std::uint32_t>((s.n + block_n - 1) / block_n), 1});
    device.submit(recording).wait();

    std::vector<double> expected(s.m * s.n), absolute(s.m * s.n);
    for (std::uint64_t i = 0; i < s.m; ++i)
        for (std::uint64_t j = 0; j < s.n; ++j)
            for (std::uint64_t l = 0; l < s.k; ++l) {
                const double product =
                    static_cast<double>(a[a_rows_are_k ? l * s.m + i : i * s.k + l]) *
                    static_cast<double>(b[b_rows_are_k ? l * s.n + j : j * s.k + l]);
                expected[i * s.n + j] += product;
                absolute[i * s.n + j] += std::abs(product);
            }
    const auto d = testing::read_back<float>(device, device_d.view());
    EXPECT_TRUE(test::elements_match(d, expected, {s.m, s.n}, test::sum_bound(s.k, absolute)))
        << s.m << " x " << s.n << " x " << s.k;
}

TEST(GemmCoopmat, MatchesF64OrSaysThatTheDeviceHasNoSuchMatrices) {
    const auto device = testing::make_device();
    const auto row = matrix_row(*device);
    if (!row) {
        EXPECT_NE(device->why_not(kernels::GemmCoopmatNt::info(), 0), "");
        EXPECT_TRUE(device->info().cooperative_matrices.empty());
        return;
    }
    for (const Shape& shape : {Shape{64, 64, 64}, Shape{33, 47, 29}, Shape{1, 200, 130},
                               Shape{130, 8, 257}, Shape{256, 320, 96}}) {
        check<kernels::GemmCoopmatNt>(*device, *row, shape, false, false);
        check<kernels::GemmCoopmatNn>(*device, *row, shape, false, true);
        check<kernels::GemmCoopmatTn>(*device, *row, shape, true, true);
    }
}

} // namespace
} // namespace bellows
