// SPDX-License-Identifier: MIT

// The generated shader bank: bindings carry values in the manifest's order, SPIR-V is embedded.

#include <bellows/kernels/kernels.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <set>
#include <span>
#include <string>

namespace bellows {
namespace {

constexpr std::uint32_t kSpirvMagic = 0x07230203;

TEST(ShaderBank, EveryVariantIsEmbeddedOrSaysWhyNot) {
    ASSERT_FALSE(kernels::all().empty());
    for (const KernelInfo* kernel : kernels::all()) {
        for (const KernelVariant& variant : kernel->variants) {
            SCOPED_TRACE(std::string(kernel->name) + "." + std::string(variant.name));
            if (!variant.native.text.empty()) {
                EXPECT_TRUE(variant.spirv.empty());
                EXPECT_TRUE(variant.reason_not_built.empty());
                EXPECT_FALSE(variant.features.empty()) << "no other device runs it";
                EXPECT_EQ(*(variant.native.text.data() + variant.native.text.size()), '\0');
                const std::string entry = ".entry " + std::string(variant.native.entry) + "(";
                EXPECT_NE(variant.native.text.find(entry), std::string_view::npos);
                continue;
            }
            if (variant.spirv.empty()) {
                EXPECT_FALSE(variant.reason_not_built.empty());
                EXPECT_FALSE(variant.features.empty()) << "every compiler must build this one";
                continue;
            }
            EXPECT_TRUE(variant.reason_not_built.empty());
            ASSERT_GT(variant.spirv.size(), 5U);
            EXPECT_EQ(variant.spirv[0], kSpirvMagic);
        }
    }
}

/// spirv-opt leaves one function.
std::size_t functions(std::span<const std::uint32_t> spirv) {
    constexpr std::uint32_t kOpFunction = 54, kHeaderWords = 5;
    std::size_t count = 0;
    for (std::size_t at = kHeaderWords; at < spirv.size(); at += std::max(spirv[at] >> 16, 1u))
        count += (spirv[at] & 0xffff) == kOpFunction;
    return count;
}

TEST(ShaderBank, KernelsAreOptimizedUnlessTheManifestSaysNo) {
    for (const KernelVariant& variant : kernels::GemmNt::info().variants)
        EXPECT_EQ(functions(variant.spirv), variant.spirv.empty() ? 0u : 1u) << variant.name;
    for (const KernelVariant& variant : kernels::Fp8PackedGemm::info().variants)
        EXPECT_TRUE(variant.spirv.empty() || functions(variant.spirv) > 1) << variant.name;
}

TEST(ShaderBank, NamesAreUnique) {
    std::set<std::string_view> names;
    for (const KernelInfo* kernel : kernels::all())
        EXPECT_TRUE(names.insert(kernel->name).second) << kernel->name;
}

TEST(ShaderBank, BindingsKeepTheOrderOfTheManifest) {
    const BufferView view{nullptr, 16, 32};
    const kernels::FillWords kernel{.variant = kernels::FillWords::Variant::u32,
                                    .constants = {.local_size = 128},
                                    .destination = view,
                                    .num_words = 7,
                                    .value = 0xdeadbeef};
    EXPECT_EQ(kernel.operands()[0].offset, 16U);
    EXPECT_EQ(kernel.push_words(), (std::array<std::uint32_t, 2>{7, 0xdeadbeef}));
    EXPECT_EQ(kernel.constant_values(), (std::array<std::uint32_t, 1>{128}));
    EXPECT_EQ(kernel.variant_index(), 0U);

    const KernelInfo& info = kernels::FillWords::info();
    EXPECT_EQ(info.name, "fill_words");
    ASSERT_EQ(info.operands.size(), 1U);
    EXPECT_EQ(info.operands[0].access, Access::Write);
    EXPECT_EQ(info.push_words, 2U);
    ASSERT_EQ(info.constants.size(), 1U);
    EXPECT_EQ(info.constants[0].default_value, 64U);
}

} // namespace
} // namespace bellows
