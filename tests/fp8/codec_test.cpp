// SPDX-License-Identifier: MIT
// The device's codecs: every code and every critical value, bit by bit as the host's.

#include "fp8/codes.hpp"
#include "support/op_test.hpp"

#include <bellows/fp8/quantize.hpp>

namespace bellows {
namespace {

using test::kFormats;

class Fp8Codec : public testing::OpTest {
protected:
    static Buffer buffer(std::uint64_t bytes) {
        return Buffer(device(), {.name = "codec", .bytes = (bytes + 15) / 16 * 16});
    }
};

TEST_F(Fp8Codec, DecodesAllCodes) {
    for (const fp8::Format format : kFormats) {
        std::vector<std::uint8_t> codes(256);
        for (std::size_t i = 0; i < codes.size(); ++i)
            codes[i] = static_cast<std::uint8_t>(i);
        const Buffer in = buffer(256), out = buffer(1024);
        device().upload(in.view(), std::span<const std::uint8_t>(codes));
        run([&](Recording& recording) {
            fp8::decode(recording, in.tensor(fp8::dtype_of(format), {256}),
                        out.tensor(DType::F32, {256}));
        });
        const auto values = testing::read_back<std::uint32_t>(device(), out.view());
        for (std::size_t i = 0; i < codes.size(); ++i) {
            const float expected = fp8::decode(format, codes[i]);
            if (std::isnan(expected)) {
                EXPECT_TRUE(std::isnan(std::bit_cast<float>(values[i]))) << i;
            } else {
                EXPECT_EQ(values[i], std::bit_cast<std::uint32_t>(expected)) << i;
            }
        }
    }
}

TEST_F(Fp8Codec, EncodesLikeTheHost) {
    for (const fp8::Format format : kFormats) {
        const std::vector<float> values = test::critical_values(format);
        const Buffer in = buffer(4 * values.size()), out = buffer(values.size());
        device().upload(in.view().sub(0, 4 * values.size()), std::span<const float>(values));
        run([&](Recording& recording) {
            fp8::encode(recording, in.tensor(DType::F32, {values.size()}),
                        out.tensor(fp8::dtype_of(format), {values.size()}));
        });
        const auto codes = testing::read_back<std::uint8_t>(device(), out.view());
        for (std::size_t i = 0; i < values.size(); ++i)
            ASSERT_EQ(codes[i], fp8::encode(format, values[i]))
                << to_string(format) << " of " << values[i] << ", bits " << std::hex
                << std::bit_cast<std::uint32_t>(values[i]);
    }
}

TEST_F(Fp8Codec, SaysWhatDoesNotFit) {
    const Buffer memory = buffer(64);
    const TensorView x = memory.tensor(DType::F32, {8});
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(fp8::encode(recording, x, memory.tensor(DType::F8E4M3, {12})), Error);
    EXPECT_THROW(fp8::encode(recording, x, memory.tensor(DType::U8, {8})), Error);
    EXPECT_THROW(
        fp8::decode(recording, memory.tensor(DType::F8E4M3, {6}), memory.tensor(DType::F32, {6})),
        Error);
}

} // namespace
} // namespace bellows
