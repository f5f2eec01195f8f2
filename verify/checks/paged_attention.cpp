// SPDX-License-Identifier: MIT
// A paged cache, its attention and rotation by positions.
#include "verify/checks/families.hpp"
#include "verify/checks/paged_rig.hpp"

#include "verify/reference/ops.hpp"

#include <bellows/engine/attention.hpp>
#include <bellows/engine/elementwise.hpp>
#include <bellows/engine/gemm_plan.hpp>

namespace bellows::checks {

namespace {

using Sequences = std::array<PagedSequence, 5>;

struct PagedCase {
    DType cache;                   ///< F8E4M3 is of latents
    std::uint64_t kv_heads, group; ///< kv_heads 0: latents
    std::uint64_t a, b;            ///< latent and rope, or qk_dim and v_dim
    std::uint64_t split_blocks, rows_per_item;
    Sequences sequences;
    Depth depth = Depth::Quick;

    ops::CacheShape shape() const {
        return kv_heads == 0 ? latent_cache(cache, a, b) : heads_cache(cache, kv_heads, a, b);
    }
    std::uint64_t heads() const { return std::max<std::uint64_t>(kv_heads, 1) * group; }
};

constexpr Sequences kShort{{{1, 1, 1}, {1, 64, 2}, {2, 65, 3}, {1, 0, 4}, {4, 131, 5}}};
constexpr Sequences kLong{{{1, 700, 1}, {3, 3, 2}, {1, 1, 3}, {37, 150, 4}, {2, 0, 5}}};
constexpr Sequences kThousands{{{1, 3001, 1}, {4, 2048, 2}, {1, 17, 3}, {0, 0, 4}, {1, 127, 5}}};

constexpr auto kPagedCases = std::to_array<PagedCase>({
    {DType::F32, 0, 3, 16, 8, 1, 0, kShort},
    {DType::F8E4M3, 0, 5, 128, 16, 1, 1, kShort},
    {DType::BF16, 2, 4, 32, 16, 1, 0, kShort},
    {DType::BF16, 2, 5, 24, 16, 2, 0, kLong},
    {DType::BF16, 0, 3, 64, 16, 1, 0, kShort},
    {DType::BF16, 0, 16, 64, 16, 2, 0, kLong, Depth::Full},
    {DType::BF16, 0, 19, 128, 32, 1, 0, kLong, Depth::Full},
    {DType::BF16, 1, 3, 32, 32, 8, 0, kThousands, Depth::Full},
    {DType::BF16, 2, 4, 128, 128, 2, 0, kLong, Depth::Full},
    {DType::BF16, 1, 5, 256, 256, 8, 0, kShort, Depth::Full},
    {DType::F8E4M3, 0, 16, 256, 32, 2, 0, kLong, Depth::Full},
    {DType::F8E4M3, 0, 16, 512, 64, 8, 0, kThousands, Depth::Full},
    {DType::F32, 2, 1, 12, 20, 2, 3, kLong, Depth::Full},
    {DType::BF16, 0, 16, 512, 64, 2, 0, kShort, Depth::Full},
    {DType::BF16, 0, 16, 512, 64, 1, 16, kLong, Depth::Full},
    {DType::BF16, 0, 16, 512, 64, 8, 0, kThousands, Depth::Full},
    {DType::BF16, 0, 128, 512, 64, 1, 0, kShort, Depth::Full},
    {DType::F8E4M3, 0, 16, 512, 64, 8, 0, kShort, Depth::Full},
    {DType::F8E4M3, 0, 24, 256, 4, 2, 16, kLong, Depth::Full},
    {DType::F32, 0, 4, 576, 64, 1, 0, kShort, Depth::Full},
    {DType::BF16, 0, 2, 64, 16, 8, 0, kThousands, Depth::Full},
    {DType::F32, 1, 9, 128, 128, 8, 0, kThousands, Depth::Full},
    {DType::F32, 4, 2, 4, 4, 1, 16, kLong, Depth::Full},
    {DType::BF16, 1, 1, 600, 132, 1, 3, kLong, Depth::Full},
});

void check_paged(Check& check, const OpRig& rig, DType act, const PagedCase& c) {
    check.begin_case(std::string(to_string(c.cache)) + " of " + std::to_string(c.kv_heads) + " x " +
                     by(c.a, c.b) + ", " + std::to_string(c.heads()) + " heads, parts of " +
                     std::to_string(c.split_blocks) + " blocks");
    const PagedRig paged(rig, act, c.shape(), c.heads(), {c.sequences.begin(), c.sequences.end()},
                         7);
    const PagedRig::Result actual = paged.run(c.split_blocks, c.rows_per_item);
    const reference::PagedResult expected = paged.expected();
    double largest = 0;
    for (const double value : expected.out)
        largest = std::max(largest, std::abs(value));
    check.elements("log of the sum", actual.lse, expected.lse, {paged.rows(), paged.heads()},
                   reference::within(1e-5, 0));
    // Scores up to about 10 carry an error of 1e-6, which exp makes a relative error of its weight.
    // On matrix units weights are rounded to the elements of matrices, times their values' scales;
    // of f16 those below 2^-14 of the largest to multiples of 2^-24.
    const GemmClass::Units units = act == DType::BF16 && c.cache != DType::F32
                                       ? gemm_class(rig.device()).units
                                       : GemmClass::Units::None;
    const double storage = act == DType::BF16 ? 1.01 * reference::kBf16Epsilon : 0;
    reference::Vector error(expected.out.size(), 1e-5 * largest);
    if (units != GemmClass::Units::None) {
        const bool f16 = units == GemmClass::Units::F16;
        const auto sums = paged.absolute_sums();
        std::uint64_t keys = 0;
        for (const PagedSequence& s : c.sequences)
            keys = std::max(keys, s.keys);
        for (std::uint64_t i = 0; i < error.size(); ++i)
            error[i] += (f16 ? 0x1p-11 : reference::kBf16Epsilon) * sums[i] +
                        (f16 ? 0x1p-24 * static_cast<double>(keys) : 0);
    }
    check.elements(
        "forward", actual.o, expected.out, {paged.rows(), paged.heads(), paged.v_dim()},
        [&](std::size_t i, double value) { return error[i] + storage * std::abs(value); });
    check.untouched("forward", actual.around);
}

struct EntryCase {
    DType cache;
    std::uint64_t kv_heads, a, b, rows; ///< kv_heads 0: latents
    Depth depth = Depth::Quick;
};

constexpr auto kEntryCases = std::to_array<EntryCase>({
    {DType::F32, 0, 16, 8, 5},
    {DType::BF16, 0, 12, 4, 70},
    {DType::F8E4M3, 0, 512, 64, 9},
    {DType::BF16, 3, 12, 20, 70},
    {DType::F8E4M3, 0, 128, 4, 70, Depth::Full},
    {DType::F32, 2, 4, 8, 200, Depth::Full},
});

/// Rows to their places and back, by way of a copy of their block; some have no place.
void check_entries(Check& check, const OpRig& rig, DType act, const EntryCase& c) {
    check.begin_case(std::to_string(c.rows) + " rows, " + to_string(c.cache) + " of " +
                     std::to_string(c.kv_heads) + " x " + by(c.a, c.b));
    const ops::CacheShape shape = c.kv_heads == 0 ? latent_cache(c.cache, c.a, c.b)
                                                  : heads_cache(c.cache, c.kv_heads, c.a, c.b);
    const EntryParts parts(shape);
    const std::uint64_t half = (c.rows + ops::kCacheBlock - 1) / ops::kCacheBlock,
                        blocks = 2 * half;
    const std::uint64_t a = parts.heads * c.a, b = parts.heads * c.b;
    const auto a_values = OpRig::random(act, c.rows * a, 1, -30, 30),
               b_values = OpRig::random(act, c.rows * b, 2, -30, 30);
    std::vector<std::uint32_t> places, copied, pairs{0, ops::kNoPlace};
    for (std::uint64_t i = 0; i < c.rows; ++i) {
        const std::uint64_t place = half * ops::kCacheBlock - 1 - i;
        places.push_back(i % 3 == 1 ? ops::kNoPlace : static_cast<std::uint32_t>(place));
        copied.push_back(i % 3 == 1 ? ops::kNoPlace
                                    : static_cast<std::uint32_t>(place + half * ops::kCacheBlock));
    }
    for (std::uint64_t i = 0; i < half; ++i) {
        pairs.push_back(static_cast<std::uint32_t>(i));
        pairs.push_back(static_cast<std::uint32_t>(half + i));
    }
    const Buffer memory(rig.device(), {.name = "cache", .bytes = ops::cache_bytes(shape, blocks)});
    const ops::PagedCache cache{shape, blocks, memory.view()};
    const auto part = [&](std::uint64_t size) {
        return rig.head(act, {c.rows, parts.heads, size + 4}, size);
    };
    const OpTensor a_in = part(c.a), b_in = part(c.b), a_out = part(c.a), b_out = part(c.b);
    const OpTensor places_t = rig.tensor(DType::U32, {c.rows}, places),
                   copied_t = rig.tensor(DType::U32, {c.rows}, copied),
                   pairs_t = rig.tensor(DType::U32, {pairs.size() / 2, 2}, pairs);
    rig.write(a_in.view, a_values);
    rig.write(b_in.view, b_values);
    const auto flat = [&](const OpTensor& tensor) { // of one head
        TensorView view = tensor.view;
        view.rank = 2;
        view.extent = {view.extent[0], view.extent[2], 0, 0};
        view.stride = {view.stride[0], 1, 0, 0};
        return view;
    };
    rig.run([&](Recording& recording) {
        if (c.kv_heads == 0)
            ops::cache_append_latent(recording, cache, flat(a_in), flat(b_in), places_t);
        else
            ops::cache_append_heads(recording, cache, a_in, b_in, places_t);
        ops::cache_copy_blocks(recording, cache, pairs_t);
        if (c.kv_heads == 0)
            ops::cache_gather_latent(recording, cache, copied_t, flat(a_out), flat(b_out));
        else
            ops::cache_gather_heads(recording, cache, copied_t, a_out, b_out);
    });
    const auto back = [&](const char* name, const OpTensor& tensor, std::vector<float> stored) {
        for (std::uint64_t i = 0; i < stored.size(); ++i) {
            if (i / (stored.size() / c.rows) % 3 == 1)
                stored[i] = 0;
            else if (act == DType::BF16)
                stored[i] = reference::round_to_bf16(stored[i]);
        }
        check.exact(name, rig.read(tensor), stored);
        check.untouched(name, rig.outside(tensor));
    };
    back("first part", a_out, as_stored(a_values, a, c.cache));
    back("second part", b_out,
         as_stored(b_values, b, c.cache == DType::F8E4M3 ? DType::BF16 : c.cache));
}

reference::Vector rope_frequencies(std::uint64_t rope) {
    reference::Vector frequencies;
    for (std::uint64_t i = 0; i < rope / 2; ++i)
        frequencies.push_back(
            std::pow(10000, -2.0 * static_cast<double>(i) / static_cast<double>(rope)));
    return frequencies;
}

constexpr auto kAppendCases = std::to_array<EntryCase>({
    {DType::F32, 0, 16, 8, 5},
    {DType::BF16, 0, 64, 16, 70},
    {DType::F8E4M3, 0, 512, 64, 9},
    {DType::BF16, 3, 12, 20, 70},
    {DType::F8E4M3, 0, 1152, 4, 70, Depth::Full},
    {DType::F32, 2, 64, 8, 200, Depth::Full},
});

/// What a projection leaves, normalised and rotated into a cache and gathered from it.
void check_append(Check& check, const OpRig& rig, DType act, const EntryCase& c) {
    check.begin_case(std::to_string(c.rows) + " rows, " + to_string(c.cache) + " of " +
                     std::to_string(c.kv_heads) + " x " + by(c.a, c.b));
    const bool latents = c.kv_heads == 0;
    const ops::CacheShape shape =
        latents ? latent_cache(c.cache, c.a, c.b) : heads_cache(c.cache, c.kv_heads, c.a, c.b);
    const std::uint64_t heads = EntryParts(shape).heads, rope = latents ? c.b : c.a,
                        blocks = c.rows / ops::kCacheBlock + 1, positions = 1000;
    constexpr float kEps = 1e-5F;
    const auto a = OpRig::random(act, c.rows * heads * c.a, 1, -3, 3),
               b = OpRig::random(act, c.rows * heads * c.b, 2, -3, 3),
               gain = OpRig::random(act, c.a, 3, 0.5, 2);
    std::vector<std::uint32_t> places, at;
    for (std::uint64_t i = 0; i < c.rows; ++i) {
        places.push_back(static_cast<std::uint32_t>(blocks * ops::kCacheBlock - 1 - i));
        at.push_back(static_cast<std::uint32_t>(i * 37 % positions));
    }
    const Buffer memory(rig.device(), {.name = "cache", .bytes = ops::cache_bytes(shape, blocks)});
    const ops::PagedCache cache{shape, blocks, memory.view()};
    const reference::Vector frequencies = rope_frequencies(rope);
    const OpTensor kv = rig.head(act, {c.rows, heads, c.a + c.b + 4}, c.a + c.b);
    const TensorView a_in = ops::slice(kv, 2, 0, c.a), b_in = ops::slice(kv, 2, c.a, c.b);
    rig.write(a_in, a);
    rig.write(b_in, b);
    const OpTensor gain_t = rig.tensor(act, {c.a}, gain),
                   table = rig.tensor(DType::F32, {positions, rope / 2, 2},
                                      ops::rope_table(positions, frequencies)),
                   places_t = rig.tensor(DType::U32, {c.rows}, places),
                   at_t = rig.tensor(DType::U32, {c.rows}, at),
                   a_out = rig.result(act, {c.rows, heads, c.a}),
                   b_out = rig.result(act, {c.rows, heads, c.b});
    const auto flat = [](TensorView view) { // of one head
        view.rank = 2;
        view.extent = {view.extent[0], view.extent[2], 0, 0};
        view.stride = {view.stride[0], 1, 0, 0};
        return view;
    };
    rig.run([&](Recording& r) {
        if (latents) {
            ops::cache_append_normalised_latent(r, cache, flat(kv), gain_t, kEps, table, at_t,
                                                places_t);
            ops::cache_gather_latent(r, cache, places_t, flat(a_out), flat(b_out));
        } else {
            ops::cache_append_rotated_heads(r, cache, a_in, b_in, table, at_t, places_t);
            ops::cache_gather_heads(r, cache, places_t, a_out, b_out);
        }
    });
    const std::vector<std::int64_t> wanted(at.begin(), at.end());
    const auto rotated = reference::rope(reference::to_double(latents ? b : a), wanted,
                                         {.rows = c.rows,
                                          .heads = heads,
                                          .head_dim = rope,
                                          .dim = rope,
                                          .frequencies = frequencies});
    const auto other =
        latents ? reference::rmsnorm_forward(reference::to_double(a), reference::to_double(gain),
                                             c.rows, c.a, static_cast<double>(kEps))
                      .y
                : reference::to_double(b);
    // Codes have four significant bits, and steps of 2^-9 of their scale below 2^-6.
    const bool codes = c.cache == DType::F8E4M3;
    double largest = 0;
    for (const double value : other)
        largest = std::max(largest, std::abs(value));
    const double half = act == DType::BF16 || c.cache != DType::F32 ? reference::kBf16Epsilon : 0;
    const auto bound = [&](bool in_codes) {
        return reference::within(in_codes ? 0x1.1p-10 * largest / 448 : 1e-6,
                                 1e-5 + 1.01 * half + (in_codes ? 0x1.1p-4 : 0));
    };
    check.elements(latents ? "normalised latent" : "rotated keys", rig.read(a_out),
                   latents ? other : rotated, {c.rows, heads, c.a}, bound(codes));
    check.elements(latents ? "rotated key part" : "values", rig.read(b_out),
                   latents ? rotated : other, {c.rows, heads, c.b}, bound(false));
}

struct RopeAtCase {
    std::uint64_t heads, rope;
    Depth depth = Depth::Quick;
};

constexpr auto kRopeAtCases = std::to_array<RopeAtCase>({{1, 8}, {3, 64}});

void check_rope_at(Check& check, const OpRig& rig, DType dtype, const RopeAtCase& c) {
    check.begin_case(by(c.heads, c.rope));
    const std::vector<std::uint32_t> at{5, 0, 999, 5, 17, 16, 998};
    const std::uint64_t tokens = at.size(), positions = 1000;
    const reference::Vector frequencies = rope_frequencies(c.rope);
    const auto x = OpRig::random(dtype, tokens * c.heads * c.rope, 1);
    const OpTensor x_t = rig.tensor(dtype, {tokens, c.heads, c.rope}, x);
    const OpTensor y = rig.head(dtype, {tokens, c.heads, c.rope + 4}, c.rope);
    const OpTensor table =
        rig.tensor(DType::F32, {positions, c.rope / 2, 2}, ops::rope_table(positions, frequencies));
    const OpTensor at_t = rig.tensor(DType::U32, {tokens}, at);
    rig.run([&](Recording& recording) { ops::rope_at(recording, x_t, table, at_t, y); });
    const std::vector<std::int64_t> wanted(at.begin(), at.end());
    const auto expected = reference::rope(reference::to_double(x), wanted,
                                          {.rows = tokens,
                                           .heads = c.heads,
                                           .head_dim = c.rope,
                                           .dim = c.rope,
                                           .frequencies = frequencies});
    check.elements("forward", rig.read(y), expected, {tokens, c.heads, c.rope},
                   storage_bound(dtype, 4, 2));
    check.untouched("forward", rig.outside(y));
}

} // namespace

void add_paged_attention_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "rope by positions", kRopeAtCases, check_rope_at);
    add_table(checks, depth, "paged cache", kEntryCases, check_entries);
    add_table(checks, depth, "paged cache of projections", kAppendCases, check_append);
    add_table(checks, depth, "paged attention", kPagedCases, check_paged);
    checks.back().depends_on_gemm_class = true; // of bf16
}

} // namespace bellows::checks
