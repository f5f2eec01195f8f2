// SPDX-License-Identifier: MIT
// What attention needs around its kernel: views, rotary embedding, keys of latent attention and
// strided copies.
#include "arguments.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/attention.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/paged_attention.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <cmath>

namespace bellows::ops {

TensorView slice(const TensorView& view, std::uint32_t dimension, std::uint64_t first,
                 std::uint64_t count) {
    const Arguments arguments("slice");
    arguments.require(dimension < view.rank && first <= view.extent[dimension] &&
                          count <= view.extent[dimension] - first,
                      "[" + std::to_string(first) + ", " + std::to_string(first) + " + " +
                          std::to_string(count) + ") of dimension " + std::to_string(dimension) +
                          " of " + describe(view));
    TensorView part = view;
    const std::uint64_t skipped = first * view.stride[dimension] * size_of(view.dtype);
    arguments.require(skipped <= view.buffer.bytes,
                      "the memory of " + describe(view) + " is smaller than its shape");
    part.buffer = view.buffer.sub(skipped, view.buffer.bytes - skipped);
    part.extent[dimension] = count;
    if (dimension == 0) {
        part.row_count = {};
    }
    return part;
}

std::vector<float> rope_table(std::uint64_t positions, std::span<const double> frequencies,
                              double amplitude) {
    const std::uint64_t pairs = frequencies.size();
    std::vector<float> table(positions * 2 * pairs);
    for (std::uint64_t pair = 0; pair < pairs; ++pair) {
        for (std::uint64_t position = 0; position < positions; ++position) {
            const double angle = static_cast<double>(position) * frequencies[pair];
            const std::uint64_t at = 2 * (position * pairs + pair);
            table[at] = static_cast<float>(amplitude * std::cos(angle));
            table[at + 1] = static_cast<float>(amplitude * std::sin(angle));
        }
    }
    return table;
}

namespace {

/// [tokens, columns] as [tokens, 1, columns].
TensorView with_heads(const TensorView& view) {
    if (view.rank != 2) {
        return view;
    }
    TensorView heads = view;
    heads.rank = 3;
    heads.extent = {view.extent[0], 1, view.extent[1], 0};
    heads.stride = {view.stride[0], 0, view.stride[1], 0};
    return heads;
}

/// Where tokens stand: first + token % seq, or as `each` of them says.
struct Positions {
    std::uint64_t seq = 1, first = 0;
    TensorView each{};
};

void rope(const char* op, Recording& recording, const TensorView& from, const TensorView& table,
          const TensorView& to, const Positions& at, bool inverse) {
    const Arguments arguments(op);
    const TensorView x = with_heads(from), y = with_heads(to);
    arguments.rank("x", x, 3);
    arguments.activation("x", x);
    const std::uint64_t tokens = x.extent[0], heads = x.extent[1], size = x.extent[2];
    arguments.strided("x", x, x.dtype, {tokens, heads, size});
    arguments.strided("y", y, x.dtype, {tokens, heads, size});
    arguments.rank("table", table, 3);
    arguments.tensor("table", table, DType::F32, {table.extent[0], size / 2, 2});
    arguments.require(at.seq > 0, "seq is 0");
    const std::uint64_t positions = at.first + std::min(at.seq, tokens);
    arguments.require(positions <= table.extent[0], "positions up to " + std::to_string(positions) +
                                                        ", the table has " +
                                                        std::to_string(table.extent[0]));
    const bool by_position = static_cast<bool>(at.each.buffer);
    if (by_position)
        arguments.tensor("positions", at.each, DType::U32, {tokens});
    if (tokens == 0 || heads == 0 || size == 0) {
        return;
    }
    const std::uint32_t size4 = arguments.groups_of_4("rope", size);
    // A whole head per invocation on CPU drivers, four elements elsewhere.
    arguments.u32("four-element items", tokens * heads * size4);
    const std::uint32_t segments = recording.device().info().is_cpu ? 1 : size4;
    const FlatPlan plan = plan_flat(recording, tokens * heads * segments, 1);
    const BufferView table_memory = arguments.memory("table", table);
    recording.dispatch(
        kernels::Rope{.variant = storage_variant<kernels::Rope>(x.dtype),
                      .constants = {.local_size = plan.local_size},
                      .x = arguments.memory("x", x),
                      .table = table_memory,
                      .positions = arguments.memory_or("positions", at.each, table_memory, 1),
                      .y = arguments.memory("y", y),
                      .tokens = arguments.u32("tokens", tokens),
                      .heads = static_cast<std::uint32_t>(heads),
                      .segments = segments,
                      .segment4 = size4 / segments,
                      .x_token4 = arguments.groups_of_4("x's token stride", x.stride[0]),
                      .x_head4 = arguments.groups_of_4("x's head stride", x.stride[1]),
                      .y_token4 = arguments.groups_of_4("y's token stride", y.stride[0]),
                      .y_head4 = arguments.groups_of_4("y's head stride", y.stride[1]),
                      .seq = arguments.u32("seq", at.seq),
                      .first_position = arguments.u32("first_position", at.first),
                      .inverse = inverse ? 1u : 0u,
                      .by_position = by_position ? 1u : 0u},
        plan.groups);
}

} // namespace

void rope_forward(Recording& recording, const TensorView& x, const TensorView& table,
                  const TensorView& y, std::uint64_t seq, std::uint64_t first_position) {
    rope("rope_forward", recording, x, table, y, {.seq = seq, .first = first_position}, false);
}

void rope_dgrad(Recording& recording, const TensorView& dy, const TensorView& table,
                const TensorView& dx, std::uint64_t seq, std::uint64_t first_position) {
    rope("rope_dgrad", recording, dy, table, dx, {.seq = seq, .first = first_position}, true);
}

void rope_at(Recording& recording, const TensorView& x, const TensorView& table,
             const TensorView& positions, const TensorView& y) {
    const Arguments arguments("rope_at");
    arguments.require(static_cast<bool>(positions.buffer), "positions have no memory");
    rope("rope_at", recording, x, table, y, {.each = positions}, false);
}

namespace {

struct KeySizes {
    std::uint64_t tokens, heads, nope, rope;
};

KeySizes check_keys(const Arguments& arguments, const TensorView& kv_up, const TensorView& k_rope,
                    const TensorView& keys) {
    arguments.rank("keys", keys, 3);
    arguments.rank("kv_up", kv_up, 3);
    arguments.rank("k_rope", k_rope, 2);
    arguments.activation("keys", keys);
    const std::uint64_t tokens = keys.extent[0], heads = keys.extent[1], size = keys.extent[2];
    const std::uint64_t rope = k_rope.extent[1];
    arguments.multiple_of_4("rope", rope);
    arguments.multiple_of_4("nope + rope", size);
    arguments.require(rope <= size && kv_up.extent[2] >= size - rope,
                      "keys of " + std::to_string(size) + " columns from " +
                          std::to_string(kv_up.extent[2]) + " and " + std::to_string(rope));
    arguments.tensor("keys", keys, keys.dtype, {tokens, heads, size});
    arguments.strided("kv_up", kv_up, keys.dtype, {tokens, heads, kv_up.extent[2]});
    arguments.strided("k_rope", k_rope, keys.dtype, {tokens, rope});
    return {tokens, heads, size - rope, rope};
}

} // namespace

void mla_keys_forward(Recording& recording, const TensorView& kv_up, const TensorView& k_rope,
                      const TensorView& keys) {
    const Arguments arguments("mla_keys_forward");
    const KeySizes sizes = check_keys(arguments, kv_up, k_rope, keys);
    if (keys.num_elements() == 0) {
        return;
    }
    const RowPlan plan = plan_rows(recording, sizes.tokens * sizes.heads,
                                   (sizes.nope + sizes.rope) / 4, RowWork::Elementwise);
    recording.dispatch(
        kernels::MlaKeysForward{
            .variant = storage_variant<kernels::MlaKeysForward>(keys.dtype),
            .constants = {plan.local_size, plan.row_per_workgroup},
            .kv_up = arguments.memory("kv_up", kv_up),
            .k_rope = arguments.memory("k_rope", k_rope),
            .keys = arguments.memory("keys", keys),
            .tokens = arguments.u32("tokens", sizes.tokens),
            .heads = arguments.u32("heads", sizes.heads),
            .nope4 = arguments.groups_of_4("nope", sizes.nope),
            .rope4 = arguments.groups_of_4("rope", sizes.rope),
            .kv_token4 = arguments.groups_of_4("kv_up's token stride", kv_up.stride[0]),
            .kv_head4 = arguments.groups_of_4("kv_up's head stride", kv_up.stride[1]),
            .rope_token4 = arguments.groups_of_4("k_rope's token stride", k_rope.stride[0])},
        plan.groups);
}

void mla_keys_dgrad(Recording& recording, const TensorView& d_keys, const TensorView& d_kv_up,
                    const TensorView& d_k_rope) {
    const Arguments arguments("mla_keys_dgrad");
    const KeySizes sizes = check_keys(arguments, d_kv_up, d_k_rope, d_keys);
    if (d_keys.num_elements() == 0) {
        return;
    }
    const RowPlan plan =
        plan_rows(recording, sizes.tokens, (sizes.nope + sizes.rope) / 4, RowWork::Elementwise);
    recording.dispatch(
        kernels::MlaKeysDgrad{
            .variant = storage_variant<kernels::MlaKeysDgrad>(d_keys.dtype),
            .constants = {plan.local_size, plan.row_per_workgroup},
            .d_keys = arguments.memory("d_keys", d_keys),
            .d_kv_up = arguments.memory("d_kv_up", d_kv_up),
            .d_k_rope = arguments.memory("d_k_rope", d_k_rope),
            .tokens = arguments.u32("tokens", sizes.tokens),
            .heads = arguments.u32("heads", sizes.heads),
            .nope4 = arguments.groups_of_4("nope", sizes.nope),
            .rope4 = arguments.groups_of_4("rope", sizes.rope),
            .kv_token4 = arguments.groups_of_4("d_kv_up's token stride", d_kv_up.stride[0]),
            .kv_head4 = arguments.groups_of_4("d_kv_up's head stride", d_kv_up.stride[1]),
            .rope_token4 = arguments.groups_of_4("d_k_rope's token stride", d_k_rope.stride[0])},
        plan.groups);
}

namespace {

/// One to three dimensions as three.
TensorView three_dimensions(const TensorView& view) {
    TensorView three = view;
    three.rank = 3;
    three.extent = {1, 1, 1, 0};
    three.stride = {0, 0, 1, 0};
    for (std::uint32_t i = 0; i < view.rank; ++i) {
        three.extent[3 - view.rank + i] = view.extent[i];
        three.stride[3 - view.rank + i] = view.stride[i];
    }
    return three;
}

} // namespace

void copy(Recording& recording, const TensorView& from, const TensorView& to, bool accumulate) {
    const Arguments arguments("copy");
    arguments.require(from.rank >= 1 && from.rank <= 3 && to.rank == from.rank,
                      "from " + describe(from) + " to " + describe(to) +
                          ": wanted are one to three dimensions");
    arguments.activation("x", from);
    const TensorView x = three_dimensions(from), y = three_dimensions(to);
    const std::uint64_t outer = x.extent[0], inner = x.extent[1], columns = x.extent[2];
    arguments.strided("x", x, x.dtype, {outer, inner, columns});
    arguments.strided("y", y, x.dtype, {outer, inner, columns});
    if (x.num_elements() == 0) {
        return;
    }
    const std::uint64_t rows = outer * inner;
    arguments.u32("rows", rows);
    kernels::StridedCopy::Constants constants;
    Groups groups;
    if (recording.device().info().is_cpu && rows >= 64) {
        const RowPlan plan = plan_rows(recording, rows, columns / 4, RowWork::Elementwise);
        constants = {.local_size = plan.local_size};
        groups = plan.groups;
    } else {
        const std::uint32_t wide = fours_at_once({x, y});
        const FlatPlan plan = plan_flat(recording, rows * (columns / 4 / wide), 16);
        constants = {.local_size = plan.local_size, .by_units = 1, .wide = wide};
        groups = plan.groups;
    }
    recording.dispatch(
        kernels::StridedCopy{.variant = storage_variant<kernels::StridedCopy>(x.dtype),
                             .constants = constants,
                             .x = arguments.memory("x", x),
                             .y = arguments.memory("y", y),
                             .outer = static_cast<std::uint32_t>(outer),
                             .inner = static_cast<std::uint32_t>(inner),
                             .columns4 = arguments.groups_of_4("columns", columns),
                             .x_outer4 = arguments.groups_of_4("x's stride", x.stride[0]),
                             .x_inner4 = arguments.groups_of_4("x's stride", x.stride[1]),
                             .y_outer4 = arguments.groups_of_4("y's stride", y.stride[0]),
                             .y_inner4 = arguments.groups_of_4("y's stride", y.stride[1]),
                             .accumulate = accumulate ? 1u : 0u},
        groups);
}

void mla_queries(Recording& recording, const TensorView& q, const TensorView& weights,
                 const TensorView& table, const TensorView& positions, const TensorView& y) {
    const Arguments arguments("mla_queries");
    arguments.rank("q", q, 3);
    arguments.rank("weights", weights, 3);
    arguments.activation("q", q);
    const std::uint64_t rows = q.extent[0], heads = q.extent[1], nope = weights.extent[1],
                        latent = weights.extent[2];
    arguments.require(q.extent[2] >= nope,
                      "q is " + describe(q) + ", weights are " + describe(weights));
    const std::uint64_t rope = q.extent[2] - nope, unit = 16 / size_of(q.dtype);
    arguments.strided("q", q, q.dtype, {rows, heads, nope + rope});
    arguments.strided("y", y, q.dtype, {rows, heads, latent + rope});
    arguments.strided("weights", weights, q.dtype, {heads, nope, latent});
    arguments.require(rows <= kMostMlaQueryRows && latent > 0 && latent % unit == 0 &&
                          weights.stride[0] % unit == 0 && weights.stride[1] % unit == 0,
                      "q is " + describe(q) + ", weights are " + describe(weights) +
                          "; wanted are up to 8 rows, and rows of weights in 16 bytes");
    arguments.rank("table", table, 3);
    arguments.tensor("table", table, DType::F32, {table.extent[0], rope / 2, 2});
    arguments.tensor("positions", positions, DType::U32, {rows});
    if (rows == 0)
        return;
    const bool cpu = recording.device().info().is_cpu;
    // A workgroup has a line of memory of each row of weights; its sums fit what all devices have.
    const std::uint32_t columns = 8, splits = cpu ? 1 : rows > 4 ? 8 : rows > 2 ? 16 : 32;
    using K = kernels::MlaQueries;
    K kernel{.variant = storage_variant<K>(q.dtype),
             .constants = {.local_size = columns * splits,
                           .splits = splits,
                           .rows = static_cast<std::uint32_t>(rows)},
             .q = arguments.memory("q", q),
             .weights = arguments.memory("weights", weights, unit),
             .table = arguments.memory("table", table),
             .positions = arguments.memory("positions", positions, 1),
             .y = arguments.memory("y", y),
             .latent4 = arguments.groups_of_4("latent", latent),
             .nope4 = arguments.groups_of_4("nope", nope),
             .rope4 = arguments.groups_of_4("rope", rope),
             .q_row4 = arguments.groups_of_4("q's row stride", q.stride[0]),
             .q_head4 = arguments.groups_of_4("q's head stride", q.stride[1]),
             .w_row = arguments.u32("weights' row stride", weights.stride[1] / unit),
             .w_batch = arguments.u32("weights' stride", weights.stride[0] / unit),
             .y_row4 = arguments.groups_of_4("y's row stride", y.stride[0]),
             .y_head4 = arguments.groups_of_4("y's head stride", y.stride[1])};
    recording.dispatch(kernel, {static_cast<std::uint32_t>(div_up(latent / unit, columns) + 1),
                                arguments.u32("heads", heads)});
}

} // namespace bellows::ops
