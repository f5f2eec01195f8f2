// SPDX-License-Identifier: MIT
// The loops that give ceilings have rates, and see when memory does not hold what they wrote.

#include "support/peaks.hpp"

#include <bellows/base/error.hpp>

#include <gtest/gtest.h>

#include <set>

namespace bellows::bench {
namespace {

class BenchPeaks : public ::testing::Test {
protected:
    std::unique_ptr<Device> device_ = Device::create(DeviceOptions::from_environment({}));
};

TEST_F(BenchPeaks, APatternIsFoundWordByWord) {
    constexpr std::uint64_t kBytes = 192 * 1024;
    const Buffer memory(*device_, {.name = "memory", .bytes = kBytes});
    write_pattern(*device_, memory.view(), 7);
    std::vector<std::uint32_t> words(kBytes / 4);
    device_->download(memory.view(), std::span<std::uint32_t>(words));
    for (std::uint32_t w = 0; w < words.size(); ++w)
        ASSERT_EQ(words[w], w + 7);
    EXPECT_NO_THROW(expect_pattern(*device_, memory.view(), 7));
    EXPECT_THROW(expect_pattern(*device_, memory.view(), 8), Error);

    for (const std::uint64_t w : {std::uint64_t{0}, kBytes / 8 + 3, kBytes / 4 - 1}) {
        const std::uint32_t right = words[w], wrong = right ^ 0x10000u;
        device_->upload(memory.view().sub(w * 4, 4), std::span<const std::uint32_t>(&wrong, 1));
        try {
            expect_pattern(*device_, memory.view(), 7);
            ADD_FAILURE() << "word " << w << " is wrong, and nobody saw it";
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("1 of 49152 words"), std::string::npos)
                << error.what();
        }
        device_->upload(memory.view().sub(w * 4, 4), std::span<const std::uint32_t>(&right, 1));
    }
    EXPECT_NO_THROW(expect_pattern(*device_, memory.view(), 7));
}

TEST_F(BenchPeaks, MemoryHasRates) {
    std::set<std::string> names;
    for (const MemoryLoop loop : {MemoryLoop::Copy, MemoryLoop::Read, MemoryLoop::Write}) {
        const Ceiling peak = memory_peak(*device_, loop, 100'000); // rounded up
        EXPECT_EQ(peak.unit, "GB/s");
        EXPECT_GT(peak.groups, 0u);
        const double bytes = 2 * 65536 * (loop == MemoryLoop::Copy ? 2 : 1);
        EXPECT_NEAR(peak.rate * peak.seconds, 1e-9 * bytes, 1e-12 * bytes);
        names.insert(peak.name);
    }
    EXPECT_EQ(names, (std::set<std::string>{"copy", "read", "write"}));
}

TEST_F(BenchPeaks, UnitsHaveRates) {
    const Ceiling fma = fma_peak(*device_);
    EXPECT_EQ(fma.name + " " + fma.unit, "fma GFLOPS");
    EXPECT_GT(fma.rate, 0);
    for (const MatrixRow& row : matrix_rows(*device_)) {
        EXPECT_TRUE(device_->has_feature("coopmat_" + name_of(row))) << name_of(row);
        const Ceiling matrix = matrix_peak(*device_, row);
        EXPECT_GT(matrix.seconds, 0) << name_of(row);
        EXPECT_EQ(matrix.rate > 0, !device_->info().is_cpu) << name_of(row);
    }
}

} // namespace
} // namespace bellows::bench
