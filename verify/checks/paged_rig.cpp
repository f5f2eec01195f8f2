// SPDX-License-Identifier: MIT
#include "verify/checks/paged_rig.hpp"

#include "verify/reference/fp8.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace bellows::checks {

ops::CacheShape latent_cache(DType dtype, std::uint64_t latent, std::uint64_t rope) {
    return {.form = ops::CacheShape::Form::Latent, .dtype = dtype, .latent = latent, .rope = rope};
}

ops::CacheShape heads_cache(DType dtype, std::uint64_t kv_heads, std::uint64_t qk_dim,
                            std::uint64_t v_dim) {
    return {.form = ops::CacheShape::Form::Heads,
            .dtype = dtype,
            .kv_heads = kv_heads,
            .qk_dim = qk_dim,
            .v_dim = v_dim};
}

std::vector<float> as_stored(const std::vector<float>& rows, std::uint64_t size, DType dtype) {
    std::vector<float> stored = rows;
    if (dtype == DType::BF16)
        std::ranges::transform(rows, stored.begin(), reference::round_to_bf16);
    if (dtype != DType::F8E4M3)
        return stored;
    std::vector<std::uint8_t> codes(rows.size());
    for (std::uint64_t row = 0; row < rows.size() / size; ++row)
        for (std::uint64_t first = 0; first < size; first += 128) {
            const float scale = reference::fp8_quantize_block(
                rows, size, {row, row + 1, first, first + 128}, reference::Fp8Format::E4M3,
                reference::Fp8Rule::F32, codes);
            for (std::uint64_t i = row * size + first; i < row * size + first + 128; ++i)
                stored[i] =
                    static_cast<float>(reference::fp8_value(reference::Fp8Format::E4M3, codes[i]) *
                                       static_cast<double>(scale));
        }
    return stored;
}

EntryParts::EntryParts(const ops::CacheShape& shape)
    : heads(shape.form == ops::CacheShape::Form::Heads ? shape.kv_heads : 1),
      a(shape.form == ops::CacheShape::Form::Heads ? shape.qk_dim : shape.latent),
      b(shape.form == ops::CacheShape::Form::Heads ? shape.v_dim : shape.rope) {
}

std::uint64_t PagedRig::qk_dim() const {
    const bool heads = shape_.form == ops::CacheShape::Form::Heads;
    return heads ? shape_.qk_dim : shape_.latent + shape_.rope;
}

std::uint64_t PagedRig::v_dim() const {
    return shape_.form == ops::CacheShape::Form::Heads ? shape_.v_dim : shape_.latent;
}

float PagedRig::scale() const {
    return 1.0f / std::sqrt(static_cast<float>(qk_dim()));
}

PagedRig::PagedRig(const OpRig& rig, DType act, const ops::CacheShape& shape, std::uint64_t heads,
                   std::vector<PagedSequence> sequences, std::uint64_t order)
    : rig_(rig), act_(act), shape_(shape), heads_(heads), sequences_(std::move(sequences)) {
    blocks_ = 2; // that nobody has
    for (const PagedSequence& s : sequences_) {
        const std::uint64_t of_sequence = (s.keys + ops::kCacheBlock - 1) / ops::kCacheBlock;
        blocks_ += of_sequence;
        table_blocks_ = std::max(table_blocks_, of_sequence + 1);
        rows_ += s.rows;
    }
    std::vector<std::uint32_t> free(blocks_);
    std::iota(free.begin(), free.end(), 0u);
    reference::Random random(order);
    for (std::uint64_t i = free.size(); i > 1; --i)
        std::swap(free[i - 1], free[random.below(i)]);
    tables_.assign(sequences_.size() * table_blocks_, ops::kNoPlace);
    for (std::uint64_t i = 0; i < sequences_.size(); ++i)
        for (std::uint64_t block = 0; block * ops::kCacheBlock < sequences_[i].keys; ++block) {
            tables_[i * table_blocks_ + block] = free.back();
            free.pop_back();
        }
    fill();
}

void PagedRig::fill() {
    const EntryParts parts(shape_);
    const std::uint64_t a = parts.heads * parts.a, b = parts.heads * parts.b;
    const std::uint64_t places = blocks_ * ops::kCacheBlock;
    a_.assign(places * a, 0);
    b_.assign(places * b, 0);
    std::vector<float> new_a, new_b;
    std::vector<std::uint32_t> at;
    for (std::uint64_t i = 0; i < sequences_.size(); ++i) {
        const PagedSequence& s = sequences_[i];
        const auto q = OpRig::random(act_, s.rows * heads_ * qk_dim(), 3 * s.name + 1, -2, 2);
        q_.insert(q_.end(), q.begin(), q.end());
        const auto mine_a = OpRig::random(act_, s.keys * a, 3 * s.name + 2, -2, 2);
        const auto mine_b = OpRig::random(act_, s.keys * b, 3 * s.name + 3, -2, 2);
        const DType b_type = shape_.dtype == DType::F8E4M3 ? DType::BF16 : shape_.dtype;
        const auto stored_a = as_stored(mine_a, a, shape_.dtype);
        const auto stored_b = as_stored(mine_b, b, b_type);
        for (std::uint64_t token = 0; token < s.keys; ++token) {
            const std::uint64_t block = tables_[i * table_blocks_ + token / ops::kCacheBlock];
            const std::uint64_t place = block * ops::kCacheBlock + token % ops::kCacheBlock;
            at.push_back(static_cast<std::uint32_t>(place));
            std::copy_n(stored_a.begin() + static_cast<std::ptrdiff_t>(token * a), a,
                        a_.begin() + static_cast<std::ptrdiff_t>(place * a));
            std::copy_n(stored_b.begin() + static_cast<std::ptrdiff_t>(token * b), b,
                        b_.begin() + static_cast<std::ptrdiff_t>(place * b));
        }
        new_a.insert(new_a.end(), mine_a.begin(), mine_a.end());
        new_b.insert(new_b.end(), mine_b.begin(), mine_b.end());
    }
    // What no token was written to is NaN.
    const std::uint64_t bytes = ops::cache_bytes(shape_, blocks_);
    cache_ = Buffer(rig_.device(), {.name = "cache", .bytes = bytes});
    const std::vector<std::uint32_t> words(bytes / 4, kUntouched);
    rig_.device().upload(cache_.view(), std::span<const std::uint32_t>(words));
    const std::uint64_t tokens = at.size();
    if (tokens == 0)
        return;
    const OpTensor a_t = rig_.tensor(act_, {tokens, parts.heads, parts.a}, new_a),
                   b_t = rig_.tensor(act_, {tokens, parts.heads, parts.b}, new_b),
                   places_t = rig_.tensor(DType::U32, {tokens}, at);
    const ops::PagedCache cache{shape_, blocks_, cache_.view()};
    rig_.run([&](Recording& recording) {
        if (shape_.form == ops::CacheShape::Form::Heads)
            ops::cache_append_heads(recording, cache, a_t, b_t, places_t);
        else
            ops::cache_append_latent(recording, cache, a_t.view.reshaped({tokens, a}),
                                     b_t.view.reshaped({tokens, b}), places_t);
    });
}

PagedRig::Result PagedRig::run(std::uint64_t split_blocks, std::uint64_t rows_per_item) const {
    const EntryParts parts(shape_);
    if (rows_per_item == 0)
        rows_per_item = ops::paged_rows_per_item(rig_.device(), shape_, act_, heads_);
    std::vector<ops::PagedQueries> queries;
    std::uint64_t blocks = 0; // read by all groups of rows
    for (std::uint64_t i = 0; i < sequences_.size(); ++i) {
        const PagedSequence& s = sequences_[i];
        queries.push_back({s.rows, s.keys, static_cast<std::uint32_t>(i)});
        blocks += (s.rows + rows_per_item - 1) / rows_per_item * (s.keys / ops::kCacheBlock + 1);
    }
    const ops::PagedPlan plan = ops::plan_paged_attention(queries, split_blocks, rows_per_item);
    ops::PagedWork work;
    work.capacity =
        ops::paged_capacity(rows_, sequences_.size(), blocks, split_blocks, rows_per_item);
    if (plan.num_items() > work.capacity.items || plan.partials > work.capacity.partials)
        throw Error(ErrorCode::Internal, "the plan is larger than its capacity");
    std::vector<std::uint32_t> items = plan.items;
    items.resize(work.capacity.item_words(), kUntouched);
    const OpTensor items_t = rig_.tensor(DType::U32, {items.size()}, items),
                   rows_t = rig_.tensor(DType::U32, {rows_, ops::PagedPlan::kRowWords}, plan.rows),
                   tables_t = rig_.tensor(DType::U32, {sequences_.size(), table_blocks_}, tables_);
    work.items = items_t;
    work.rows = rows_t;
    work.tables = tables_t;
    constexpr std::uint64_t kGap = 4; // behind each head
    const OpTensor q = rig_.head(act_, {rows_, heads_, qk_dim() + kGap}, qk_dim()),
                   o = rig_.head(act_, {rows_, heads_, v_dim() + kGap}, v_dim()),
                   lse = rig_.result(DType::F32, {rows_, heads_});
    rig_.write(q.view, q_);
    const Buffer workspace =
        rig_.workspace(ops::paged_attention_workspace_bytes(work.capacity, heads_, v_dim()));
    const ops::PagedCache cache{shape_, blocks_, cache_.view()};
    rig_.run([&](Recording& recording) {
        ops::paged_attention(recording, q, cache, work, o, lse, scale(), workspace.view());
    });
    return {rig_.read(o), rig_.read(lse), rig_.outside(o)};
}

reference::PagedResult PagedRig::attend(const reference::Vector& q, const reference::Vector& keys,
                                        const reference::Vector& values) const {
    const EntryParts parts(shape_);
    std::vector<reference::PagedRows> queries;
    for (std::uint64_t i = 0; i < sequences_.size(); ++i)
        queries.push_back({sequences_[i].rows, sequences_[i].keys, i});
    return reference::paged_attention(q, keys, values, queries, tables_,
                                      {.heads = heads_,
                                       .kv_heads = parts.heads,
                                       .qk_dim = qk_dim(),
                                       .v_dim = v_dim(),
                                       .scale = static_cast<double>(scale()),
                                       .block = ops::kCacheBlock,
                                       .table_blocks = table_blocks_});
}

reference::PagedResult PagedRig::expected() const {
    const auto a = reference::to_double(a_), b = reference::to_double(b_);
    const bool heads = shape_.form == ops::CacheShape::Form::Heads;
    return attend(reference::to_double(q_),
                  heads ? a : reference::latent_keys(a, b, blocks_ * ops::kCacheBlock),
                  heads ? b : a);
}

reference::Vector PagedRig::absolute_sums() const {
    const auto a = reference::to_double(a_), b = reference::to_double(b_);
    const bool heads = shape_.form == ops::CacheShape::Form::Heads;
    auto values = heads ? b : a;
    for (double& value : values)
        value = std::abs(value);
    return attend(reference::to_double(q_),
                  heads ? a : reference::latent_keys(a, b, blocks_ * ops::kCacheBlock), values)
        .out;
}

} // namespace bellows::checks
