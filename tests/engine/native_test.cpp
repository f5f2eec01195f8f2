// SPDX-License-Identifier: MIT

// Kernels of a GPU's own instruction set: where they run they are ordered and replayed as any
// kernel is, elsewhere they are refused with a reason.

#include "support/test_device.hpp"

#include <bellows/engine/gemm.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/kernels/kernels.hpp>

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::test_options;

constexpr auto kVariant = static_cast<std::uint32_t>(kernels::HopperGemm::Variant::nt_64);

TEST(EngineNative, ADeviceThatCannotRunThemSaysWhatItLacks) {
    DeviceOptions options = test_options();
    options.leave_out = {"nvidia_binary_import"};
    const auto device = Device::create(options);
    EXPECT_EQ(device->why_not(kernels::HopperGemm::info(), kVariant),
              "the device lacks nvidia_binary_import");
    EXPECT_FALSE(gemm_class(*device).native);
    EXPECT_THROW(use_gemm_class(*device, "wgmma-bf16"), Error);
    const Buffer buffer(*device, {.name = "matrix", .bytes = 64 * 64 * 2});
    Recording recording(*device, QueueRole::Compute, "native");
    const kernels::HopperGemm kernel{.variant = kernels::HopperGemm::Variant::nt_64,
                                     .a = buffer.view(),
                                     .b = buffer.view(),
                                     .d = buffer.view()};
    try {
        recording.dispatch(kernel, {1});
        FAIL() << "it was recorded";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported);
        EXPECT_NE(error.message().find("nvidia_binary_import"), std::string::npos)
            << error.message();
    }
    EXPECT_EQ(recording.num_operations(), 0u);
}

/// bf16 of whole numbers, which sums keep.
std::vector<std::uint16_t> numbers(std::uint64_t count, int scale) {
    std::vector<std::uint16_t> values(count);
    for (std::uint64_t i = 0; i < count; ++i)
        values[i] = static_cast<std::uint16_t>(
            std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<int>(i % 5) - 2) *
                                         static_cast<float>(scale)) >>
            16);
    return values;
}

TEST(EngineNative, ARecordingIsReplayedWithOtherOperands) {
    const auto device = make_device();
    if (!gemm_class(*device).native)
        GTEST_SKIP() << "the device has no native products";
    constexpr std::uint64_t kSide = 256;
    constexpr std::uint64_t kBytes = kSide * kSide * 2;
    Buffer a(*device, {.name = "a", .bytes = kBytes}), b(*device, {.name = "b", .bytes = kBytes}),
        c(*device, {.name = "c", .bytes = kBytes}), d(*device, {.name = "d", .bytes = kBytes});
    const auto matrix = [](const Buffer& buffer) {
        return buffer.tensor(DType::BF16, {kSide, kSide});
    };
    Recording recording(*device, QueueRole::Compute, "two products");
    ops::gemm_nt(recording, matrix(a), matrix(b), matrix(c)); // c is read behind a barrier
    ops::gemm_nn(recording, matrix(c), matrix(b), matrix(d));
    std::vector<std::uint16_t> first(kSide * kSide), again(kSide * kSide), twice(kSide * kSide);
    device->upload(b.view(), numbers(kSide * kSide, 1));
    const auto run = [&](int scale, std::vector<std::uint16_t>& out) {
        device->upload(a.view(), numbers(kSide * kSide, scale));
        device->submit(recording).wait();
        device->download(d.view(), out);
    };
    run(1, first);
    run(2, twice);
    run(1, again);
    EXPECT_EQ(first, again);
    EXPECT_NE(first, twice);
    for (std::uint64_t i = 0; i < first.size(); ++i) { // a power of two changes exponents alone
        const auto value = [](std::uint16_t bits) {
            return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
        };
        ASSERT_EQ(2 * value(first[i]), value(twice[i])) << i;
    }
}

} // namespace
} // namespace bellows
