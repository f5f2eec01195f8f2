// SPDX-License-Identifier: MIT
// Appending to a paged cache in one dispatch: the bytes are those of the ops one after another.

#include "support/op_test.hpp"
#include "verify/checks/paged_rig.hpp"

#include <bellows/engine/elementwise.hpp>
#include <bellows/engine/norm.hpp>
#include <bellows/engine/paged_attention.hpp>

#include <algorithm>

namespace bellows {
namespace {

using checks::heads_cache;
using checks::latent_cache;
using ops::CacheShape;
using ops::kCacheBlock;
using ops::kNoPlace;
using testing::OpTensor;

constexpr std::uint64_t kPositions = 300, kBlocks = 5;
constexpr float kEps = 1e-5F;

struct Kind {
    DType act, gain;
    CacheShape shape;
};

class OpsPagedAppend : public testing::OpTest {
protected:
    /// The bytes of a cache after `append`; what nobody writes stays 0xA5.
    template <class F>
    static std::vector<std::byte> after(const CacheShape& shape, const F& append) {
        const Buffer memory(device(), {.name = "cache", .bytes = ops::cache_bytes(shape, kBlocks)});
        std::vector<std::byte> bytes(ops::cache_bytes(shape, kBlocks), std::byte{0xA5});
        device().upload(memory.view(), std::span<const std::byte>(bytes));
        run([&](Recording& r) { append(r, ops::PagedCache{shape, kBlocks, memory.view()}); });
        device().download(memory.view(), std::span<std::byte>(bytes));
        return bytes;
    }

    /// Every third row has no place.
    static OpTensor places(std::uint64_t rows) {
        std::vector<std::uint32_t> at;
        for (std::uint64_t i = 0; i < rows; ++i)
            at.push_back(i % 3 == 1 ? kNoPlace
                                    : static_cast<std::uint32_t>(i * 7 % (kBlocks * kCacheBlock)));
        return tensor(DType::U32, {rows}, at);
    }
    static OpTensor positions(std::uint64_t rows) {
        std::vector<std::uint32_t> at;
        for (std::uint64_t i = 0; i < rows; ++i)
            at.push_back(static_cast<std::uint32_t>((i * 41 + 1) % kPositions));
        return tensor(DType::U32, {rows}, at);
    }
    static OpTensor table(std::uint64_t rope) {
        return tensor(DType::F32, {kPositions, rope / 2, 2},
                      random(DType::F32, kPositions * rope, 9));
    }

    static std::vector<std::byte> untouched_cache(const CacheShape& shape) {
        return std::vector<std::byte>(ops::cache_bytes(shape, kBlocks), std::byte{0xA5});
    }
};

TEST_F(OpsPagedAppend, NormalisedLatentsAreThoseOfThreeOps) {
    const std::vector<Kind> kinds{
        {DType::F32, DType::F32, latent_cache(DType::F32, 16, 8)},
        {DType::F32, DType::F32, latent_cache(DType::BF16, 36, 4)},
        {DType::F32, DType::F32, latent_cache(DType::F8E4M3, 512, 64)},
        {DType::F32, DType::F32, latent_cache(DType::BF16, 12, 0)},
        {DType::BF16, DType::F32, latent_cache(DType::F32, 64, 16)},
        {DType::BF16, DType::BF16, latent_cache(DType::BF16, 512, 64)},
        {DType::BF16, DType::BF16, latent_cache(DType::F8E4M3, 128, 16)},
        {DType::BF16, DType::F32, latent_cache(DType::F8E4M3, 1664, 8)},
    };
    for (const Kind& kind : kinds)
        for (const std::uint64_t rows : {1u, 7u, 200u}) {
            SCOPED_TRACE(std::string(to_string(kind.act)) + " to " + to_string(kind.shape.dtype) +
                         ", a latent of " + std::to_string(kind.shape.latent) + ", " +
                         std::to_string(rows) + " rows");
            const std::uint64_t latent = kind.shape.latent, rope = kind.shape.rope,
                                width = latent + rope;
            auto values = random(kind.act, rows * width, 1, -3, 3);
            if (rows > 3) {
                std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(2 * width), width, 0.0F);
                values[3 * width + 1] = 0x1p60F;
            }
            const OpTensor kv = rig().head(kind.act, {rows, width + 4}, width);
            write(kv.view, values);
            const OpTensor gain = tensor(kind.gain, {latent}, random(kind.gain, latent, 2, 0, 2)),
                           at = positions(rows), to = places(rows), angles = table(rope),
                           y = result(kind.act, {rows, latent}),
                           key = result(kind.act, {rows, rope}),
                           inverse = result(DType::F32, {rows});
            const auto one = after(kind.shape, [&](Recording& r, const ops::PagedCache& cache) {
                ops::cache_append_normalised_latent(r, cache, kv, gain, kEps, angles, at, to);
            });
            const auto three = after(kind.shape, [&](Recording& r, const ops::PagedCache& cache) {
                ops::rmsnorm_forward(r, ops::slice(kv, 1, 0, latent), gain, y, inverse, kEps);
                if (rope > 0)
                    ops::rope_at(r, ops::slice(kv, 1, latent, rope), angles, at, key);
                ops::cache_append_latent(r, cache, y, key, to);
            });
            EXPECT_EQ(one, three);
            EXPECT_NE(one, untouched_cache(kind.shape));
            EXPECT_EQ(read(kv), values) << "kv is read alone";
        }
}

TEST_F(OpsPagedAppend, RotatedHeadsAreThoseOfTwoOps) {
    for (const DType act : {DType::F32, DType::BF16})
        for (const DType stored : {DType::F32, DType::BF16})
            for (const std::uint64_t rows : {1u, 7u, 200u}) {
                SCOPED_TRACE(std::string(to_string(act)) + " to " + to_string(stored) + ", " +
                             std::to_string(rows) + " rows");
                const std::uint64_t heads = 3, qk = 48, v = 20;
                const CacheShape shape = heads_cache(stored, heads, qk, v);
                const OpTensor keys = rig().head(act, {rows, heads, qk + 4}, qk),
                               values = rig().head(act, {rows, heads, v + 8}, v),
                               turned = result(act, {rows, heads, qk}), at = positions(rows),
                               to = places(rows), angles = table(qk);
                const auto before = random(act, rows * heads * qk, 1, -3, 3);
                write(keys.view, before);
                write(values.view, random(act, rows * heads * v, 2, -3, 3));
                const auto one = after(shape, [&](Recording& r, const ops::PagedCache& cache) {
                    ops::cache_append_rotated_heads(r, cache, keys, values, angles, at, to);
                });
                const auto two = after(shape, [&](Recording& r, const ops::PagedCache& cache) {
                    ops::rope_at(r, keys, angles, at, turned);
                    ops::cache_append_heads(r, cache, turned, values, to);
                });
                EXPECT_EQ(one, two);
                EXPECT_NE(one, untouched_cache(shape));
                EXPECT_EQ(read(keys), before) << "keys keep their values";
            }
}

TEST_F(OpsPagedAppend, SaysWhatDoesNotFit) {
    const CacheShape latents = latent_cache(DType::BF16, 16, 8),
                     of_heads = heads_cache(DType::BF16, 2, 16, 8);
    const Buffer memory(device(), {.name = "cache", .bytes = ops::cache_bytes(of_heads, 1)});
    const ops::PagedCache cache{latents, 1, memory.view()}, second{of_heads, 1, memory.view()};
    const OpTensor kv = result(DType::F32, {3, 24}), gain = result(DType::F32, {16}),
                   half_gain = result(DType::BF16, {16}), angles = table(8), wide = table(16),
                   at = positions(3), few = positions(2), to = places(3),
                   keys = result(DType::F32, {3, 2, 16}), values = result(DType::F32, {3, 2, 8});
    Recording recording(device(), QueueRole::Compute, "refused");
    const auto latent = [&](const ops::PagedCache& into, const TensorView& x, const TensorView& g,
                            const TensorView& t, const TensorView& p) {
        ops::cache_append_normalised_latent(recording, into, x, g, kEps, t, p, to);
    };
    EXPECT_THROW(latent(second, kv, gain, angles, at), Error) << "heads";
    EXPECT_THROW(latent(cache, gain, gain, angles, at), Error);
    EXPECT_THROW(latent(cache, kv, half_gain, angles, at), Error) << "kv is f32";
    EXPECT_THROW(latent(cache, kv, gain, wide, at), Error);
    EXPECT_THROW(latent(cache, kv, gain, angles, few), Error);
    const auto append = [&](const ops::PagedCache& into, const TensorView& t, const TensorView& p) {
        ops::cache_append_rotated_heads(recording, into, keys, values, t, p, to);
    };
    EXPECT_THROW(append(cache, wide, at), Error) << "latents";
    EXPECT_THROW(append(second, angles, at), Error);
    EXPECT_THROW(append(second, {}, at), Error);
    EXPECT_THROW(append(second, wide, few), Error);
    EXPECT_EQ(recording.num_operations(), 0u);
}

} // namespace
} // namespace bellows
