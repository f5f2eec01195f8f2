// SPDX-License-Identifier: MIT
// Rotary embedding, the keys of latent attention and strided copies, on parts of wider tensors.
#include "verify/checks/families.hpp"

#include "verify/reference/ops.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;

struct RopeCase {
    std::uint64_t tokens, heads, nope, rope, seq, first;
    Depth depth = Depth::Quick;
};

constexpr auto kRopeCases = std::to_array<RopeCase>({
    {1, 1, 0, 4, 1, 0},
    {7, 3, 8, 12, 7, 0},
    {30, 2, 4, 64, 10, 5},
    {9, 5, 128, 64, 9, 1000},
    {260, 4, 32, 16, 128, 0, Depth::Full},
});

void check_rope(Check& check, const OpRig& rig, DType dtype, const RopeCase& c) {
    check.begin_case(std::to_string(c.tokens) + " tokens, " + std::to_string(c.heads) +
                     " heads of " + std::to_string(c.nope) + " + " + std::to_string(c.rope));
    // Frequencies and an amplitude as stretched rotations have them.
    constexpr double kAmplitude = 0.75;
    std::vector<double> frequencies;
    for (std::uint64_t i = 0; i < c.rope / 2; ++i)
        frequencies.push_back(
            std::pow(10000, -2.0 * static_cast<double>(i) / static_cast<double>(c.rope)) /
            (i % 3 == 1 ? 40 : 1));
    const std::uint64_t size = c.nope + c.rope, positions = c.first + c.seq;
    const auto x = OpRig::random(dtype, c.tokens * c.heads * size, 1);
    const OpTensor x_t = rig.tensor(dtype, {c.tokens, c.heads, size}, x);
    const OpTensor y_t = rig.tensor(dtype, {c.tokens, c.heads, size}, x);
    const OpTensor back = rig.tensor(dtype, {c.tokens, c.heads, size}, x);
    const OpTensor there_and_back = rig.result(dtype, {c.tokens, c.heads, c.rope});
    const OpTensor table = rig.tensor(DType::F32, {positions, c.rope / 2, 2},
                                      ops::rope_table(positions, frequencies, kAmplitude));
    const auto part = [&](const OpTensor& whole) {
        return ops::slice(whole.view, 2, c.nope, c.rope);
    };
    rig.run([&](Recording& recording) {
        ops::rope_forward(recording, part(y_t), table, part(y_t), c.seq, c.first); // in place
        ops::rope_dgrad(recording, part(x_t), table, part(back), c.seq, c.first);
        ops::rope_dgrad(recording, part(y_t), table, there_and_back, c.seq, c.first);
    });
    std::vector<std::int64_t> at(c.tokens);
    for (std::size_t i = 0; i < at.size(); ++i)
        at[i] = static_cast<std::int64_t>(c.first + i % c.seq);
    const reference::RopeShape shape{.rows = c.tokens,
                                     .heads = c.heads,
                                     .head_dim = size,
                                     .offset = c.nope,
                                     .dim = c.rope,
                                     .frequencies = frequencies,
                                     .amplitude = kAmplitude};
    const auto bound = storage_bound(dtype, 4, 2);
    const auto turned = rig.read(y_t);
    check.elements("forward", turned, reference::rope(to_double(x), at, shape),
                   {c.tokens, c.heads, size}, bound);
    check.elements("input gradient", rig.read(back), reference::rope(to_double(x), at, shape, true),
                   {c.tokens, c.heads, size}, bound);
    const auto whole = reference::rope(to_double(turned), at, shape, true);
    reference::Vector expected;
    for (std::size_t i = 0; i < whole.size(); ++i)
        if (i % size >= c.nope)
            expected.push_back(whole[i]);
    check.elements("there and back", rig.read(there_and_back), expected,
                   {c.tokens, c.heads, c.rope}, bound);
}

struct KeysCase {
    std::uint64_t tokens, heads, nope, rope, value, latent;
    Depth depth = Depth::Quick;
};

constexpr auto kKeysCases = std::to_array<KeysCase>({
    {1, 1, 4, 4, 8, 16},
    {9, 3, 8, 12, 8, 16},
    {130, 4, 32, 16, 8, 16},
    {1, 1, 4, 4, 4, 0, Depth::Full},
    {9, 3, 8, 12, 20, 16, Depth::Full},
    {130, 4, 32, 16, 32, 64, Depth::Full},
    {70, 16, 128, 64, 128, 512, Depth::Full},
});

/// Keys and gradients as the definition says, of rows as they stand in memory.
struct Keys {
    std::vector<float> keys, d_up; ///< d_up: the first `nope` of each head
    reference::Vector d_rope;
};

Keys keys_of(const KeysCase& c, const std::vector<float>& up, const std::vector<float>& down,
             const std::vector<float>& d_keys) {
    Keys out;
    out.d_rope.assign(c.tokens * c.rope, 0);
    for (std::uint64_t t = 0; t < c.tokens; ++t)
        for (std::uint64_t h = 0; h < c.heads; ++h) {
            const std::uint64_t head = t * c.heads + h;
            for (std::uint64_t i = 0; i < c.nope; ++i) {
                out.keys.push_back(up[head * (c.nope + c.value) + i]);
                out.d_up.push_back(d_keys[head * (c.nope + c.rope) + i]);
            }
            for (std::uint64_t i = 0; i < c.rope; ++i) {
                out.keys.push_back(down[t * (c.latent + c.rope) + c.latent + i]);
                out.d_rope[t * c.rope + i] += d_keys[head * (c.nope + c.rope) + c.nope + i];
            }
        }
    return out;
}

void check_keys(Check& check, const OpRig& rig, DType dtype, const KeysCase& c) {
    check.begin_case(std::to_string(c.tokens) + " tokens, " + std::to_string(c.heads) +
                     " heads of " + std::to_string(c.nope) + " + " + std::to_string(c.rope));
    const std::uint64_t size = c.nope + c.rope, up = c.nope + c.value, down = c.latent + c.rope;
    const auto kv_up = OpRig::random(dtype, c.tokens * c.heads * up, 1);
    const auto kv_down = OpRig::random(dtype, c.tokens * down, 2);
    const auto d_keys = OpRig::random(dtype, c.tokens * c.heads * size, 3);
    const OpTensor kv_up_t = rig.tensor(dtype, {c.tokens, c.heads, up}, kv_up);
    const OpTensor kv_down_t = rig.tensor(dtype, {c.tokens, down}, kv_down);
    const OpTensor d_keys_t = rig.tensor(dtype, {c.tokens, c.heads, size}, d_keys);
    const OpTensor keys = rig.result(dtype, {c.tokens, c.heads, size});
    const OpTensor d_up = rig.result(dtype, {c.tokens, c.heads, up});
    const OpTensor d_down = rig.result(dtype, {c.tokens, down});
    const TensorView d_rope = ops::slice(d_down.view, 1, c.latent, c.rope);
    rig.run([&](Recording& recording) {
        ops::mla_keys_forward(recording, kv_up_t, ops::slice(kv_down_t.view, 1, c.latent, c.rope),
                              keys);
        ops::mla_keys_dgrad(recording, d_keys_t, d_up, d_rope);
    });
    const Keys expected = keys_of(c, kv_up, kv_down, d_keys);
    const TensorView d_nope = ops::slice(d_up.view, 2, 0, c.nope);
    check.exact("forward", rig.read(keys), expected.keys);
    check.exact("gradient of kv_up", rig.read(d_nope), expected.d_up);
    check.untouched("gradient of kv_up", rig.outside(d_up, d_nope));
    check.elements("gradient of k_rope", rig.read(d_rope), expected.d_rope, {c.tokens, c.rope},
                   storage_bound(dtype, static_cast<double>(c.heads), 4));
    check.untouched("gradient of k_rope", rig.outside(d_down, d_rope));
}

struct CopyCase {
    std::uint64_t tokens, heads, step;
    Depth depth = Depth::Quick;
};

constexpr auto kCopyCases =
    std::to_array<CopyCase>({{50, 3, 4}, {50, 3, 8}, {5, 3, 4}, {5, 3, 8}, {1, 1, 64}});

/// Two steps of a row of five to two of one of three; in bf16 steps of 4 are no multiples of 16
/// bytes.
void check_copy(Check& check, const OpRig& rig, DType dtype, const CopyCase& c) {
    const std::uint64_t rows = c.tokens * c.heads, moves = 2 * c.step;
    const std::uint64_t in = 5 * c.step, out = 3 * c.step;
    check.begin_case(by(c.tokens, c.heads) + " x " + std::to_string(moves) + " in " +
                     std::to_string(in) + " to " + std::to_string(out));
    const auto x = OpRig::random(dtype, rows * in, 1),
               before = OpRig::random(dtype, rows * moves, 2);
    const OpTensor x_t = rig.tensor(dtype, {c.tokens, c.heads, in}, x);
    const OpTensor y = rig.result(dtype, {c.tokens, c.heads, out});
    const OpTensor whole = rig.tensor(dtype, {rows, out}, OpRig::random(dtype, rows * out, 3));
    const OpTensor sum = rig.result(dtype, {c.tokens, c.heads, out});
    const auto part = [&](const TensorView& view) {
        return ops::slice(view, view.rank - 1, c.step, moves);
    };
    rig.write(part(sum), before);
    rig.run([&](Recording& recording) {
        const TensorView from = ops::slice(x_t.view, 2, moves, moves);
        ops::copy(recording, from, part(y));
        ops::copy(recording, y.view.reshaped({rows, out}), whole); // with what stands around
        ops::copy(recording, from, part(sum), true);
    });
    std::vector<float> moved;
    for (std::size_t i = 0; i < x.size(); ++i)
        if (i % in >= moves && i % in < 2 * moves)
            moved.push_back(x[i]);
    auto added = to_double(before);
    reference::accumulate(added, to_double(moved));
    for (const OpTensor* tensor : {&y, &whole}) {
        check.exact("copy", rig.read(part(tensor->view)), moved);
        check.untouched("copy", rig.outside(*tensor, part(tensor->view)));
    }
    check.elements("add", rig.read(part(sum.view)), added, {rows, moves}, storage_bound(dtype, 1));
    check.untouched("add", rig.outside(sum, part(sum.view)));
}

} // namespace

void add_attention_part_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "rope", kRopeCases, check_rope);
    add_table(checks, depth, "mla keys", kKeysCases, check_keys);
    add_table(checks, depth, "copy", kCopyCases, check_copy);
}

} // namespace bellows::checks
