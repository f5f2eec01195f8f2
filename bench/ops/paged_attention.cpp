// SPDX-License-Identifier: MIT
#include "ops/workloads.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/paged_attention.hpp>

#include <numeric>

namespace bellows::bench {

namespace {

/// A step of `rows` queries at the end of each sequence, all as long as `keys`.
struct Step {
    ops::PagedCache cache;
    ops::PagedWork work;
    BufferView workspace;
    TensorView q, o, a, b; ///< a, b: entries of the first sequence
    std::uint64_t heads, kv_heads, rows;
    float scale;
};

TensorView words(OpData& data, std::initializer_list<std::uint64_t> extents,
                 const std::vector<std::uint32_t>& values) {
    const TensorView view = data.empty(DType::U32, extents);
    data.device().upload(view.buffer, std::span<const std::uint32_t>(values));
    return view;
}

/// Every sequence's blocks hold the same keys.
Step make_step(OpData& data, DType act, const ops::CacheShape& shape, std::uint64_t heads,
               std::uint64_t sequences, std::uint64_t rows, std::uint64_t keys) {
    constexpr std::uint64_t kSplitBlocks = 16;
    const bool of_heads = shape.form == ops::CacheShape::Form::Heads;
    const std::uint64_t kv_heads = of_heads ? shape.kv_heads : 1;
    const std::uint64_t a = of_heads ? shape.qk_dim : shape.latent,
                        b = of_heads ? shape.v_dim : shape.rope;
    const std::uint64_t qk = of_heads ? a : a + b, value = of_heads ? b : a;
    const std::uint64_t of_sequence = div_up(keys, ops::kCacheBlock),
                        blocks = sequences * of_sequence;
    Step step;
    step.heads = heads;
    step.rows = rows;
    step.kv_heads = kv_heads;
    step.scale = 1 / std::sqrt(static_cast<float>(qk));
    step.cache = {shape, blocks, data.bytes(ops::cache_bytes(shape, blocks))};
    step.q = data.random(act, {sequences * rows, heads, qk});
    step.o = data.empty(act, {sequences * rows, heads, value});
    step.a = data.random(act, {keys, kv_heads, a});
    step.b = data.random(act, {keys, kv_heads, b});
    std::vector<std::uint32_t> table(blocks), places(keys);
    std::iota(table.begin(), table.end(), 0u);
    step.work.tables = words(data, {sequences, of_sequence}, table);
    std::vector<ops::PagedQueries> queries;
    for (std::uint32_t s = 0; s < sequences; ++s)
        queries.push_back({rows, keys, s});
    const ops::PagedPlan plan = ops::plan_paged_attention(
        queries, kSplitBlocks, ops::paged_rows_per_item(data.device(), shape, act, heads));
    step.work.capacity = {sequences * rows, plan.num_items(), plan.partials};
    step.work.items = words(data, {plan.items.size()}, plan.items);
    step.work.rows = words(data, {sequences * rows, ops::PagedPlan::kRowWords}, plan.rows);
    step.workspace =
        data.bytes(ops::paged_attention_workspace_bytes(step.work.capacity, heads, value));
    for (std::uint64_t s = 0; s < sequences; ++s) {
        std::iota(places.begin(), places.end(),
                  static_cast<std::uint32_t>(s * of_sequence * ops::kCacheBlock));
        const TensorView at = words(data, {keys}, places);
        Recording recording(data.device(), QueueRole::Compute, "prepare");
        if (of_heads)
            ops::cache_append_heads(recording, step.cache, step.a, step.b, at);
        else
            ops::cache_append_latent(recording, step.cache, step.a.reshaped({keys, a}),
                                     step.b.reshaped({keys, b}), at);
        data.device().submit(recording).wait();
    }
    return step;
}

/// Samples of the last head of the last row of the first sequence.
std::string check_step(const OpData& data, const Step& step, DType act) {
    const auto q = data.read(step.q), a = data.read(step.a), b = data.read(step.b),
               o = data.read(step.o);
    const bool latent = step.cache.shape.form == ops::CacheShape::Form::Latent;
    const std::uint64_t keys = step.a.extent[0], kv = step.kv_heads,
                        head = step.rows * step.heads - 1;
    const std::uint64_t a_size = step.a.extent[2], b_size = step.b.extent[2];
    const std::uint64_t qk = step.q.extent[2], value = step.o.extent[2];
    std::vector<double> sums(value, 0);
    double total = 0;
    for (std::uint64_t key = 0; key < keys; ++key) {
        const std::uint64_t entry = key * kv + kv - 1;
        double score = 0;
        for (std::uint64_t i = 0; i < qk; ++i)
            score += q[head * qk + i] *
                     (i < a_size ? a[entry * a_size + i] : b[entry * b_size + i - a_size]);
        const double weight = std::exp(score * step.scale);
        total += weight;
        for (std::uint64_t i = 0; i < value; ++i)
            sums[i] += weight * (latent ? a[entry * a_size + i] : b[entry * b_size + i]);
    }
    // Codes of FP8 have four significant bits; their errors average out over the keys.
    const double error = step.cache.shape.dtype == DType::F8E4M3 ? 1e-2 : tolerance(act);
    std::string wrong;
    for (const std::uint64_t i : samples(value))
        wrong += compare("o", i, o[head * value + i], sums[i] / total, error);
    return wrong;
}

Workload workload(OpData& data, DType act, const ops::CacheShape& shape, std::uint64_t heads,
                  std::uint64_t sequences, std::uint64_t rows, std::uint64_t keys) {
    const Step step = make_step(data, act, shape, heads, sequences, rows, keys);
    const auto verify = [=, &data] { return check_step(data, step, act); };
    const auto record = [=](Recording& r) {
        ops::paged_attention(r, step.q, step.cache, step.work, step.o, {}, step.scale,
                             step.workspace);
    };
    const double seen = static_cast<double>(keys) - static_cast<double>(rows - 1) / 2;
    const double pairs = static_cast<double>(sequences * rows * heads) * seen;
    const double flops = 2 * pairs * static_cast<double>(step.q.extent[2] + step.o.extent[2]);
    return {record, verify,
            bytes_of({step.q, step.o}) + static_cast<double>(step.cache.memory.bytes), flops};
}

/// A part of a prompt behind `seq` tokens, or a token of each sequence.
Workload part_of(OpData& data, const Sizes& s, DType act, const ops::CacheShape& shape,
                 std::uint64_t heads, bool prompt) {
    const std::uint64_t rows = s.seq / 8;
    return prompt ? workload(data, act, shape, heads, 1, rows, s.seq + rows)
                  : workload(data, act, shape, heads, s.sequences, 1, s.seq);
}

} // namespace

Workload paged_latent(OpData& data, const Sizes& s, DType act, int part) {
    const ops::CacheShape shape{
        .dtype = part % 2 == 1 ? DType::F8E4M3 : act, .latent = s.latent, .rope = s.rope};
    return part_of(data, s, act, shape, s.heads, part >= 2);
}

Workload paged_heads(OpData& data, const Sizes& s, DType act, int part) {
    const ops::CacheShape shape{.form = ops::CacheShape::Form::Heads,
                                .dtype = act,
                                .kv_heads = s.grouped_heads / 4,
                                .qk_dim = s.grouped_size,
                                .v_dim = s.grouped_size};
    return part_of(data, s, act, shape, s.grouped_heads, part == 1);
}

} // namespace bellows::bench
