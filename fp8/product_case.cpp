// SPDX-License-Identifier: MIT
#include "product_case.hpp"

#include "native.hpp"
#include "operands.hpp"
#include "tiles.hpp"

#include <algorithm>
#include <random>

namespace bellows::fp8 {

namespace {

/// More than the caches of a GPU hold.
constexpr std::uint64_t kBeyondCaches = std::uint64_t{96} << 20;

struct Sizes {
    std::uint64_t groups, n, k;
};

Sizes sizes_of(const DeviceInfo& info, Grouping grouping) {
    const bool dense = grouping == Grouping::Dense;
    if (info.is_cpu)
        return {dense ? 1u : 4u, 256, 256};
    const std::uint64_t scale = info.memory_bytes < std::uint64_t{8} << 30 ? 2 : 1;
    return dense ? Sizes{1, 4096 / scale, 4096 / scale} : Sizes{8, 4096 / scale, 2048 / scale};
}

std::uint64_t rows_of(const DeviceInfo& info, std::uint8_t size) {
    static constexpr std::uint64_t kRows[] = {8, 32, 96, 256, 1024};
    return info.is_cpu ? std::min<std::uint64_t>(kRows[size], 512) : kRows[size];
}

/// Finite E4M3 codes of either sign, which are finite bf16 values two by two.
std::vector<std::uint32_t> pattern() {
    std::mt19937 random(1);
    std::vector<std::uint32_t> words(4096);
    for (std::uint32_t& word : words)
        word = (static_cast<std::uint32_t>(random()) & 0x9f9f9f9fu) | 0x20202020u;
    return words;
}

TensorView one_below_the_other(TensorView view) {
    if (view.rank == 3) {
        view.rank = 2;
        view.extent = {view.extent[0] * view.extent[1], view.extent[2]};
        view.stride = {view.stride[1], view.stride[2]};
    }
    return view;
}

} // namespace

Product product_of(GemmForm form, const Operand& a, const Operand& b, const TensorView& d,
                   const GroupedRows* rows) {
    Product p{form, a, b, d, rows, false};
    if (rows == nullptr || rows->layout.form != GroupLayout::Form::Masked)
        return p;
    p.a.values = one_below_the_other(p.a.values);
    if (p.a.quantized) {
        p.a.quantized->codes = p.a.values;
        p.a.quantized->scales = one_below_the_other(p.a.quantized->scales);
    }
    p.d = one_below_the_other(d);
    return p;
}

ProductCase::ProductCase(Device& device, const ProductKind& kind, std::optional<std::uint64_t> rows)
    : device_(device), make_list_(device, QueueRole::Compute, "rows of a product to be timed") {
    const Sizes sizes = sizes_of(device.info(), kind.grouping);
    facts_.kind = kind;
    facts_.groups = sizes.groups;
    facts_.rows = rows.value_or(rows_of(device.info(), kind.rows));
    facts_.n = sizes.n;
    facts_.k = sizes.k;
    if (kind.grouping != Grouping::Dense)
        make_rows();
    make_operands();
    find_variants();
}

BufferView ProductCase::declare(std::uint64_t bytes) {
    bytes = round_up(std::max<std::uint64_t>(bytes, 16), 16);
    buffers_.emplace_back(Buffer::declare(device_, {.name = "a product to be timed"}), bytes);
    return buffers_.back().first.view().sub(0, bytes);
}

void ProductCase::make_rows() {
    const std::uint64_t groups = facts_.groups, rows = facts_.rows;
    if (facts_.kind.grouping == Grouping::ByIds) {
        for (std::uint64_t row = 0; row < groups * rows; ++row)
            layout_words_.push_back(static_cast<std::uint32_t>(row % groups));
        layout_values_ = TensorView::contiguous(declare(layout_words_.size() * 4), DType::I32,
                                                {groups * rows, 1});
        rows_ = unlisted_rows(GroupLayout::by_ids(layout_values_, groups));
        return;
    }
    const bool masked = facts_.kind.grouping == Grouping::Masked;
    for (std::uint64_t g = 0; g < groups + (masked ? 0 : 1); ++g)
        layout_words_.push_back(static_cast<std::uint32_t>(masked ? rows : g * rows));
    layout_values_ = TensorView::contiguous(declare(layout_words_.size() * 4), DType::U32,
                                            {layout_words_.size()});
    GroupLayout layout = masked ? GroupLayout::masked(layout_values_, round_up(2 * rows, 128))
                                : GroupLayout::prefix_sums(layout_values_, groups * rows);
    layout.expected_rows = rows;
    rows_ = make_grouped_rows(make_list_, layout, {facts_.n, 0, 0, 0},
                              declare(grouped_rows_bytes(device_, layout)));
}

Operand ProductCase::operand(bool quantized, Blocks blocks,
                             std::initializer_list<std::uint64_t> extents) {
    if (!quantized) {
        std::uint64_t elements = 1;
        for (const std::uint64_t extent : extents)
            elements *= extent;
        values_.push_back(declare(elements * 2));
        return TensorView::contiguous(values_.back(), DType::BF16, extents);
    }
    const bool f32 = facts_.kind.pair == Pair::Fp8F32;
    const Recipe recipe{blocks, Format::E4M3, f32 ? ScaleRule::F32 : ScaleRule::PowerOfTwo};
    const bool by_group = blocks == Blocks::Columns128 && rows_;
    values_.push_back(declare(codes_bytes(extents)));
    scales_.push_back(declare(scales_bytes(recipe, extents, by_group ? facts_.groups : 0)));
    return make_quantized(values_.back(), scales_.back(), recipe, extents,
                          by_group ? layout_values_ : TensorView{});
}

Operand ProductCase::transposed(std::initializer_list<std::uint64_t> extents) {
    const Recipe recipe{Blocks::Columns128, Format::E4M3, ScaleRule::PowerOfTwo};
    const std::uint64_t groups = rows_ ? facts_.groups : 0;
    const BufferView memory = declare(transposed_bytes(recipe, extents, groups));
    const Transposed t =
        make_transposed(memory, recipe, extents, rows_ ? layout_values_ : TensorView{});
    values_.push_back(t.codes.buffer);
    scales_.push_back(t.scales.buffer);
    return t;
}

void ProductCase::make_operands() {
    const auto& [kind, groups, each, n, k, usual, variants] = facts_;
    const std::uint64_t rows = groups * each;
    const bool bf16 = kind.pair == Pair::Bf16, quantized = !bf16 && kind.pair != Pair::Bf16Fp8;
    const auto d = [&](DType dtype, std::initializer_list<std::uint64_t> extents) {
        std::uint64_t bytes = size_of(dtype);
        for (const std::uint64_t extent : extents)
            bytes *= extent;
        return TensorView::contiguous(declare(bytes), dtype, extents);
    };
    if (kind.form == GemmForm::TN) {
        a_ = operand(quantized, Blocks::Columns128, {rows, n});
        b_ = {operand(!bf16, Blocks::Columns128, {rows, k})};
        if (quantized && why_not_native(device_).empty()) {
            transposed_a_ = transposed({rows, n});
            transposed_b_ = transposed({rows, k});
        }
        d_ = rows_ ? d(DType::F32, {groups, n, k}) : d(DType::F32, {n, k});
    } else {
        const bool nt = kind.form == GemmForm::NT;
        const std::uint64_t weight_rows = nt ? n : k, weight_columns = nt ? k : n;
        const std::uint64_t copies =
            device_.info().is_cpu ? 1 : div_up(kBeyondCaches, groups * n * k * (bf16 ? 2u : 1u));
        for (std::uint64_t i = 0; i < copies; ++i)
            b_.push_back(
                rows_ ? operand(!bf16, Blocks::Blocks128, {groups, weight_rows, weight_columns})
                      : operand(!bf16, Blocks::Blocks128, {weight_rows, weight_columns}));
        if (kind.grouping == Grouping::Masked) {
            const std::uint64_t most = rows_->layout.spacing;
            a_ = operand(quantized, Blocks::Rows128, {groups, most, k});
            d_ = d(DType::BF16, {groups, most, n});
        } else {
            a_ = operand(quantized, Blocks::Rows128, {rows, k});
            d_ = d(DType::BF16, {rows, n});
        }
    }
    workspace_ = declare(rows_ ? gemm_workspace_bytes(device_, a_, b_.front(), *rows_)
                               : gemm_workspace_bytes(device_, a_, b_.front()));
}

const Operand& ProductCase::a(Variant variant) const {
    return variant == Variant::Native && transposed_a_ ? *transposed_a_ : a_;
}

const Operand& ProductCase::b(Variant variant, std::uint64_t index) const {
    return variant == Variant::Native && transposed_b_ ? *transposed_b_ : b_[index % b_.size()];
}

Product ProductCase::product(Variant variant) const {
    return product_of(facts_.kind.form, a(variant), b(variant, 0), d_, rows_ ? &*rows_ : nullptr);
}

void ProductCase::find_variants() {
    facts_.usual = usual_variant(device_, product(Variant::Native));
    if (facts_.usual != Variant::Native)
        facts_.usual = usual_variant(device_, product(Variant::Decoded));
    for (const Variant variant : kVariants) {
        const Product p = product(variant);
        VariantTime& v = facts_.variants.emplace_back();
        v = {variant, numeric_class(device_, p, variant), why_not(device_, p, variant)};
        std::vector<TileTime> tiles;
        for (const auto& [tile, name] : tiles_of(device_, p, variant))
            tiles.push_back({tile, name});
        if (!tiles.empty())
            v.tiles.push_back({facts_.rows, std::move(tiles)});
    }
}

void ProductCase::allocate() {
    for (auto& [buffer, bytes] : buffers_)
        buffer.bind(bytes);
    fill();
    if (rows_) {
        device_.upload(layout_values_.buffer.sub(0, layout_words_.size() * 4),
                       std::span<const std::uint32_t>(layout_words_));
        if (rows_->listed())
            device_.submit(make_list_).wait();
    }
}

/// The same few random values over and over: as much work for the units as any.
void ProductCase::fill() {
    const std::vector<std::uint32_t> words = pattern();
    const Buffer source(device_, {.name = "values of products", .bytes = words.size() * 4});
    device_.upload(source.view(), std::span<const std::uint32_t>(words));
    Recording r(device_, QueueRole::Compute, "values of a product to be timed");
    for (const BufferView& view : values_) {
        std::uint64_t done = std::min(view.bytes, source.size());
        r.copy(source.view().sub(0, done), view.sub(0, done));
        for (std::uint64_t more = 0; done < view.bytes; done += more) {
            more = std::min(done, view.bytes - done);
            r.copy(view.sub(0, more), view.sub(done, more));
        }
    }
    for (const BufferView& view : scales_)
        r.fill(view, 0x3f800000); // 1
    r.fill(d_.buffer, 0);
    device_.submit(r).wait();
}

void ProductCase::record(Recording& r, const Way& way, std::uint64_t index) const {
    const Operand &a = this->a(way.variant), &b = this->b(way.variant, index);
    const bool tn = facts_.kind.form == GemmForm::TN, nt = facts_.kind.form == GemmForm::NT;
    switch (facts_.kind.grouping) {
    case Grouping::Dense:
        (tn ? gemm_tn : nt ? gemm_nt : gemm_nn)(r, a, b, d_, tn, workspace_, way);
        break;
    case Grouping::Grouped:
    case Grouping::ByIds:
        (tn   ? k_grouped_gemm_tn
         : nt ? m_grouped_gemm_nt_contiguous
              : m_grouped_gemm_nn_contiguous)(r, a, b, d_, *rows_, tn, workspace_, way);
        break;
    case Grouping::Masked:
        m_grouped_gemm_nt_masked(r, a, b, d_, *rows_, false, workspace_, way);
        break;
    }
}

} // namespace bellows::fp8
