// SPDX-License-Identifier: MIT
// The FP8 ops touch nothing behind their tensors: every operand ends at a page that may not be
// touched, and rows beyond a count are not even there. On a CPU driver a kernel that does ends the
// program; on a GPU the test only runs the ops. Numbers are the other tests' business.

#include "support/compare.hpp"
#include "support/guard_pages.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/fp8/few_rows.hpp>
#include <bellows/fp8/fused.hpp>
#include <bellows/fp8/gemm.hpp>
#include <bellows/fp8/quantize.hpp>

namespace bellows {
namespace {

using fp8::Blocks;
using fp8::Quantized;
using fp8::Recipe;

class Fp8GuardPages : public testing::GuardPagesTest {
protected:
    /// Random bytes below 0x3F: small positive codes, finite f32 and bf16.
    /// The view claims `beyond` more bytes, which are the guard page's.
    BufferView bytes(std::uint64_t size, std::uint64_t beyond = 0) {
        const Guarded memory = guarded(size + beyond, (size + 15) / 16 * 16);
        test::Random random(++seed_);
        for (std::uint64_t i = 0; i < size; ++i)
            memory.bytes[i] = static_cast<std::byte>(random.below(0x3F));
        return memory.view;
    }

    TensorView words(const std::vector<std::uint32_t>& values) {
        const BufferView memory = bytes(4 * values.size());
        device_->upload(memory, std::span<const std::uint32_t>(values));
        return TensorView::contiguous(memory, DType::U32, {values.size()});
    }

    /// Of `capacity` rows, those from `rows` on behind the guard.
    TensorView matrix(DType dtype, std::uint64_t rows, std::uint64_t capacity,
                      std::uint64_t columns) {
        const std::uint64_t row_bytes = columns * size_of(dtype);
        return TensorView::contiguous(bytes(rows * row_bytes, (capacity - rows) * row_bytes), dtype,
                                      {capacity, columns});
    }
    TensorView vector(std::uint64_t elements, std::uint64_t capacity) {
        return TensorView::contiguous(bytes(4 * elements, 4 * (capacity - elements)), DType::F32,
                                      {capacity});
    }
    Quantized quantized(std::uint64_t rows, std::uint64_t capacity, std::uint64_t columns) {
        const Recipe recipe{};
        const std::uint64_t there = 4 * rows * ((columns + 127) / 128),
                            scales = fp8::scales_bytes(recipe, {capacity, columns});
        return fp8::make_quantized(bytes(rows * columns, (capacity - rows) * columns),
                                   bytes(there, std::max(scales, there) - there), recipe,
                                   {capacity, columns});
    }
};

TEST_F(Fp8GuardPages, EveryRecipe) {
    for (const Blocks blocks :
         {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128, Blocks::PerTensor, Blocks::MX32})
        for (const auto& [rows, columns] : {std::pair<std::uint64_t, std::uint64_t>{1, 16},
                                            {3, 144},
                                            {128, 64},
                                            {131, 272},
                                            {300, 48}})
            for (const DType dtype : {DType::F32, DType::BF16}) {
                const Recipe recipe{.blocks = blocks};
                const TensorView x = TensorView::contiguous(bytes(rows * columns * size_of(dtype)),
                                                            dtype, {rows, columns});
                const Quantized q = fp8::make_quantized(
                    bytes(rows * columns), bytes(fp8::scales_bytes(recipe, {rows, columns})),
                    recipe, {rows, columns});
                for (const fp8::Form form : {fp8::Form::Lanes, fp8::Form::Few, fp8::Form::Streams})
                    run([&](Recording& r) { fp8::quantize(r, x, q, form); });
                run([&](Recording& r) { fp8::dequantize(r, q, x); });
            }
}

/// Rows of values end at multiples of eight columns, in the middle of sixteen codes.
TEST_F(Fp8GuardPages, ValuesOfColumns) {
    const Recipe by_row{}, by_column{.blocks = Blocks::Columns128};
    for (const std::vector<std::uint32_t>& starts :
         {std::vector<std::uint32_t>{}, {0, 5, 5, 133, 134, 300}})
        for (const std::uint64_t columns : {8u, 136u, 200u}) {
            const std::uint64_t rows = starts.empty() ? 131 : starts.back();
            const TensorView offsets = starts.empty() ? TensorView{} : words(starts);
            const TensorView x =
                TensorView::contiguous(bytes(rows * columns * 2), DType::BF16, {rows, columns});
            const Quantized of_rows = fp8::make_quantized(
                bytes(fp8::codes_bytes({rows, columns})),
                bytes(fp8::scales_bytes(by_row, {rows, columns})), by_row, {rows, columns});
            const fp8::Decoded y = fp8::make_decoded(bytes(fp8::decoded_bytes({rows, columns})),
                                                     by_column, {rows, columns}, offsets);
            for (const fp8::Form form : {fp8::Form::Lanes, fp8::Form::Few, fp8::Form::Streams})
                run([&](Recording& r) {
                    fp8::quantize(r, x, y, form);
                    fp8::quantize(r, x, of_rows, form);
                    fp8::requantize(r, of_rows, y, form);
                });
        }
}

TEST_F(Fp8GuardPages, TransposedColumns) {
    const Recipe by_row{}, by_column{.blocks = Blocks::Columns128};
    for (const std::vector<std::uint32_t>& starts :
         {std::vector<std::uint32_t>{}, {0, 5, 5, 133, 134, 300}})
        for (const std::uint64_t columns : {16u, 40u, 136u}) {
            const std::uint64_t rows = starts.empty() ? 131 : starts.back(),
                                groups = starts.empty() ? 0 : starts.size() - 1;
            const TensorView offsets = starts.empty() ? TensorView{} : words(starts);
            const TensorView x =
                TensorView::contiguous(bytes(rows * columns * 2), DType::BF16, {rows, columns});
            const Quantized of_rows = fp8::make_quantized(
                bytes(fp8::codes_bytes({rows, columns})),
                bytes(fp8::scales_bytes(by_row, {rows, columns})), by_row, {rows, columns});
            const std::uint64_t size = fp8::transposed_bytes(by_column, {rows, columns}, groups);
            fp8::Transposed t =
                fp8::make_transposed(bytes(size), by_column, {rows, columns}, offsets);
            t.codes.buffer = bytes(t.codes.num_bytes()); // a guard behind the codes, too
            for (const fp8::Form form : {fp8::Form::Lanes, fp8::Form::Few, fp8::Form::Streams})
                run([&](Recording& r) {
                    fp8::quantize(r, x, t, form);
                    fp8::quantize(r, x, of_rows, form);
                    fp8::requantize(r, of_rows, t, form);
                });
        }
}

TEST_F(Fp8GuardPages, TransposedCodes) {
    const Recipe recipe{.blocks = Blocks::Blocks128};
    for (const auto& [n, k] :
         {std::pair<std::uint64_t, std::uint64_t>{1, 1}, {15, 200}, {130, 40}, {257, 67}}) {
        const auto codes = [&](std::uint64_t rows, std::uint64_t columns) {
            return fp8::make_quantized(bytes(fp8::codes_bytes({3, rows, columns})),
                                       bytes(fp8::scales_bytes(recipe, {3, rows, columns})), recipe,
                                       {3, rows, columns})
                .codes;
        };
        const TensorView from = codes(n, k), to = codes(k, n);
        run([&](Recording& r) { fp8::transpose_codes(r, from, to); });
    }
}

/// Rows that end in the midst of 16 bytes, and rows beyond the count.
TEST_F(Fp8GuardPages, ProductsOfFewRows) {
    using Result = fp8::FewRowsForm::Result;
    const Recipe recipe{.blocks = Blocks::Blocks128};
    const std::uint64_t top_k = 3, experts = 2;
    const auto weights = [&](std::uint64_t n, std::uint64_t k) {
        return fp8::make_quantized(bytes(fp8::codes_bytes({experts, n, k})),
                                   bytes(fp8::scales_bytes(recipe, {experts, n, k})), recipe,
                                   {experts, n, k});
    };
    const auto last = [](Quantized q) {
        for (TensorView* view : {&q.codes, &q.scales}) {
            const std::uint64_t row = view->stride[1], at = view->stride[0] * size_of(view->dtype);
            const BufferView memory = view->buffer.sub(at, view->buffer.bytes - at);
            *view = TensorView::contiguous(memory, view->dtype, {view->extent[1], view->extent[2]});
            view->buffer = memory;
            view->stride[0] = row;
        }
        return q;
    };
    for (const DType act : {DType::F32, DType::BF16})
        for (const auto& [rows, n, k] :
             {std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>{1, 8, 4},
              {3, 132, 36},
              {8, 20, 144}})
            for (const std::uint32_t lanes : {1u, 8u}) {
                const TensorView x = matrix(act, rows, rows, k), y = matrix(act, rows, rows, n),
                                 gated = matrix(act, rows, rows, n / 2), gain = vector(k, k),
                                 count = words({1});
                fp8::FewRowsForm form{.gain = gain, .eps = 1e-6f, .cut = {.lanes = lanes}};
                const Quantized w = weights(n, k), down = weights(k, n / 2 / 4 * 4);
                TensorView ids = words(std::vector<std::uint32_t>(rows * top_k, 1));
                ids.dtype = DType::I32;
                ids = ids.reshaped({rows, top_k}).with_row_count(count.buffer);
                // A choice of all experts, and two parts for each row and head.
                const std::uint64_t most = experts, heads = experts, partials = 2 * rows;
                TensorView chosen = words(std::vector<std::uint32_t>(rows * most, 0));
                chosen.dtype = DType::I32;
                chosen = chosen.reshaped({rows, most}).with_row_count(count.buffer);
                std::vector<std::uint32_t> plan;
                for (std::uint32_t row = 0; row < rows; ++row)
                    plan.insert(plan.end(), {2 * row, 2});
                const ops::PagedParts parts{
                    .rows = words(plan).reshaped({rows, 2}),
                    .sums = vector(partials * heads * k, partials * heads * k)
                                .reshaped({partials, heads, k}),
                    .log_of_sums =
                        vector(partials * heads, partials * heads).reshaped({partials, heads})};
                const TensorView
                    by_head = matrix(act, heads * rows, heads * rows, k).reshaped({heads, rows, k}),
                    results = matrix(act, heads * rows, heads * rows, n).reshaped({heads, rows, n});
                const TensorView hidden = matrix(act, top_k, rows * top_k, n / 2),
                                 narrow = matrix(act, rows * top_k, rows * top_k, n / 2 / 4 * 4),
                                 shares = vector(rows * top_k, rows * top_k);
                run([&](Recording& r) {
                    fp8::few_rows_nt(r, x, last(w), y, form);
                    form.result = Result::Swiglu;
                    fp8::few_rows_nt(r, x, last(w), gated, form);
                    fp8::few_rows_by_ids(r, x, w, ids, hidden, form);
                    fp8::few_rows_routed(
                        r, x, w,
                        {.logits = vector(rows * experts, rows * experts).reshaped({rows, experts}),
                         .bias = vector(experts, experts),
                         .options = {},
                         .ids = chosen,
                         .weights = vector(rows * most, rows * most).reshaped({rows, most})},
                        matrix(act, most, rows * most, n / 2), form);
                    form = {.parts = parts, .cut = {.lanes = lanes}};
                    fp8::few_rows_nt(r, by_head, w, results, form);
                    if (narrow.extent[1] > 0)
                        fp8::few_rows_experts(r,
                                              {.hidden = narrow,
                                               .weights = down,
                                               .ids = ids,
                                               .choice_weights = shares.reshaped({rows, top_k}),
                                               .cut = {.lanes = lanes}},
                                              x);
                });
            }
}

TEST_F(Fp8GuardPages, AbsentRows) {
    const std::uint64_t columns = 144, more = 40;
    for (const Blocks blocks :
         {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128, Blocks::PerTensor, Blocks::MX32})
        for (const std::uint64_t rows : {1u, 7u, 128u, 131u}) {
            const Recipe recipe{.blocks = blocks};
            const TensorView count = words({static_cast<std::uint32_t>(rows)});
            const std::uint64_t capacity = rows + more;
            TensorView x = TensorView::contiguous(bytes(rows * columns * 2, more * columns * 2),
                                                  DType::BF16, {capacity, columns});
            x = x.with_row_count(count.buffer);
            const std::uint64_t scales = fp8::scales_bytes(recipe, {capacity, columns});
            const std::uint64_t there = fp8::scales_bytes(recipe, {rows, columns});
            Quantized q =
                fp8::make_quantized(bytes(rows * columns, more * columns),
                                    bytes(there, scales - there), recipe, {capacity, columns});
            q.codes.row_count = count.buffer;
            for (const fp8::Form form : {fp8::Form::Lanes, fp8::Form::Few, fp8::Form::Streams})
                run([&](Recording& r) { fp8::quantize(r, x, q, form); });
            run([&](Recording& r) { fp8::dequantize(r, q, x); });
        }
}

TEST_F(Fp8GuardPages, GroupsOfRows) {
    const std::uint64_t rows = 300, columns = 144;
    for (const std::vector<std::uint32_t>& starts : {std::vector<std::uint32_t>{0, 300},
                                                     {0, 5, 5, 133, 134, 300},
                                                     {0, 0, 128, 256, 300, 300}}) {
        const TensorView offsets = words(starts);
        const Recipe by_row{}, by_column{.blocks = Blocks::Columns128};
        const TensorView x =
            TensorView::contiguous(bytes(rows * columns * 2), DType::BF16, {rows, columns});
        const Quantized of_rows = fp8::make_quantized(
            bytes(rows * columns), bytes(fp8::scales_bytes(by_row, {rows, columns})), by_row,
            {rows, columns});
        const Quantized of_columns = fp8::make_quantized(
            bytes(rows * columns),
            bytes(fp8::scales_bytes(by_column, {rows, columns}, starts.size() - 1)), by_column,
            {rows, columns}, offsets);
        for (const fp8::Form form : {fp8::Form::Lanes, fp8::Form::Few, fp8::Form::Streams})
            run([&](Recording& r) {
                fp8::quantize_rows_and_columns(r, x, of_rows, of_columns, form);
                fp8::requantize(r, of_rows, of_columns, form);
            });
        run([&](Recording& r) { fp8::dequantize(r, of_columns, x); });
    }
}

/// Rows behind the last group, or its count, are not even there.
TEST_F(Fp8GuardPages, GroupedProducts) {
    const std::vector<std::uint32_t> starts = {0, 5, 5, 72, 73};
    const std::uint64_t groups = starts.size() - 1, rows = starts.back(), more = 40;
    const TensorView offsets = words(starts);
    for (const Blocks blocks : {Blocks::Rows128, Blocks::PerTensor, Blocks::MX32})
        for (const auto& [n, k] : {std::pair<std::uint64_t, std::uint64_t>{48, 144}, {40, 272}}) {
            const Recipe recipe{.blocks = blocks}, weights{.blocks = Blocks::Blocks128};
            const std::uint64_t scales = fp8::scales_bytes(recipe, {rows + more, k});
            const std::uint64_t there = fp8::scales_bytes(recipe, {rows, k});
            const Quantized a = fp8::make_quantized(
                bytes(rows * k, more * k), bytes(there, scales - there), recipe, {rows + more, k});
            const Quantized b = fp8::make_quantized(
                bytes(groups * n * k), bytes(fp8::scales_bytes(weights, {groups, n, k})), weights,
                {groups, n, k});
            const TensorView d = TensorView::contiguous(bytes(rows * n * 2, more * n * 2),
                                                        DType::BF16, {rows + more, n});
            const auto layout = fp8::GroupLayout::prefix_sums(offsets, rows + more);
            const BufferView list = bytes(fp8::grouped_rows_bytes(*device_, layout)),
                             scratch = bytes(fp8::gemm_workspace_bytes(*device_, a, b));
            run([&](Recording& r) {
                const auto grouped = fp8::make_grouped_rows(r, layout, {n, 0, 0, 0}, list);
                fp8::m_grouped_gemm_nt_contiguous(r, a, b, d, grouped, false, scratch);
            });
        }
}

TEST_F(Fp8GuardPages, MaskedProducts) {
    const std::uint64_t groups = 3, max_m = 40, last = 3, n = 48, k = 144;
    const std::uint64_t rows = (groups - 1) * max_m + last, more = max_m - last;
    const TensorView counts = words({7, 0, static_cast<std::uint32_t>(last)});
    const Recipe recipe{}, weights{.blocks = Blocks::Blocks128};
    const std::uint64_t scales = fp8::scales_bytes(recipe, {groups, max_m, k});
    const std::uint64_t there = fp8::scales_bytes(recipe, {rows, k});
    const Quantized a = fp8::make_quantized(bytes(rows * k, more * k), bytes(there, scales - there),
                                            recipe, {groups, max_m, k});
    const Quantized b = fp8::make_quantized(bytes(groups * n * k),
                                            bytes(fp8::scales_bytes(weights, {groups, n, k})),
                                            weights, {groups, n, k});
    const TensorView d =
        TensorView::contiguous(bytes(rows * n * 4, more * n * 4), DType::F32, {groups, max_m, n});
    const auto layout = fp8::GroupLayout::masked(counts, max_m);
    const BufferView list = bytes(fp8::grouped_rows_bytes(*device_, layout)),
                     scratch = bytes(fp8::gemm_workspace_bytes(*device_, a, b));
    run([&](Recording& r) {
        const auto grouped = fp8::make_grouped_rows(r, layout, {n, 0, 0, 0}, list);
        fp8::m_grouped_gemm_nt_masked(r, a, b, d, grouped, false, scratch);
    });
}

/// Streamed on matrix units, where the device has any; and tokens and slots that are just there.
TEST_F(Fp8GuardPages, StreamedProducts) {
    const bool units = fp8::why_not(*device_, fp8::Variant::Packed).empty();
    const std::uint64_t tokens = 5, top_k = 2, experts = 3, slots = tokens * top_k;
    const Recipe recipe{}, weights{.blocks = Blocks::Blocks128};
    for (const auto& [n, k] :
         {std::pair<std::uint64_t, std::uint64_t>{48, 144}, {40, 272}, {40, 256}}) {
        const Quantized a = fp8::make_quantized(
            bytes(tokens * k), bytes(fp8::scales_bytes(recipe, {tokens, k})), recipe, {tokens, k});
        const Quantized b = fp8::make_quantized(bytes(experts * n * k),
                                                bytes(fp8::scales_bytes(weights, {experts, n, k})),
                                                weights, {experts, n, k});
        const TensorView d = TensorView::contiguous(bytes(slots * n * 4), DType::F32, {slots, n});
        const BufferView chosen = bytes(4 * slots);
        const std::vector<std::int32_t> ids = {0, 2, 2, 0, -1, 2, 0, 2, 2, 0};
        device_->upload(chosen, std::span<const std::int32_t>(ids));
        const auto map = [&](std::uint64_t count, DType dtype) {
            return TensorView::contiguous(bytes(4 * count), dtype, {count});
        };
        const ops::MoeLayout layout{.counts = map(experts, DType::U32),
                                    .offsets = map(experts + 1, DType::U32),
                                    .row_to_slot = map(slots, DType::I32),
                                    .slot_to_row = map(slots, DType::I32).reshaped({tokens, top_k}),
                                    .alignment = 1};
        const BufferView list = bytes(fp8::grouped_rows_bytes(
                             *device_, fp8::GroupLayout::prefix_sums(layout.offsets, slots))),
                         more = bytes(ops::moe_layout_workspace_bytes(tokens, top_k, experts)),
                         scratch = bytes(fp8::gemm_workspace_bytes(*device_, a, b, slots));
        const auto by_slots = [&](const fp8::Way& way) {
            run([&](Recording& r) {
                auto rows = fp8::make_grouped_rows(
                    r, TensorView::contiguous(chosen, DType::I32, {tokens, top_k}), layout, more,
                    {n, 0, 0, 0}, list);
                rows.slots_per_a_row = top_k;
                rows.d_by_slot = true;
                fp8::m_grouped_gemm_nt_contiguous(r, a, b, d, rows, false, scratch, way);
            });
        };
        const TensorView topk = TensorView::contiguous(chosen, DType::I32, {tokens, top_k});
        const auto rows = fp8::unlisted_rows(fp8::GroupLayout::by_ids(topk, experts));
        const BufferView exact = bytes(fp8::gemm_workspace_bytes(*device_, a, b, rows));
        const auto by_ids = [&](const fp8::Way& way) {
            run([&](Recording& r) {
                fp8::m_grouped_gemm_nt_contiguous(r, a, b, d, rows, false, exact, way);
            });
        };
        const TensorView one = TensorView::contiguous(d.buffer, DType::F32, {tokens, n});
        Quantized matrix = b;
        matrix.codes = TensorView::contiguous(b.codes.buffer, b.codes.dtype, {n, k});
        matrix.scales = TensorView::contiguous(b.scales.buffer, DType::F32,
                                               {b.scales.extent[1], b.scales.extent[2]});
        by_slots(fp8::Variant::Decoded);
        for (const bool direct : {false, true}) {
            fp8::Way way = fp8::Variant::Streamed;
            if (units && device_->info().is_cpu)
                way.tile =
                    direct
                        ? fp8::Tile{.fragments_m = 1, .fragments_n = 1, .warps_n = 2, .warps_k = 2}
                        : fp8::Tile{.fragments_m = 1,
                                    .fragments_n = 1,
                                    .warps_n = 4,
                                    .step_k = 128,
                                    .ahead = 2};
            by_slots(way);
            by_ids(way);
            run([&](Recording& r) { fp8::gemm_nt(r, a, matrix, one, false, scratch, way); });
        }
    }
}

TEST_F(Fp8GuardPages, DirectProducts) {
    for (const GemmClass& c : gemm_classes(*device_))
        if (c.units != GemmClass::Units::None && c.why_not.empty())
            use_gemm_class(*device_, c.name);
    if (gemm_class(*device_).units == GemmClass::Units::None)
        return;
    fp8::Way way = fp8::Variant::Direct;
    if (device_->info().is_cpu) {
        const GemmClass& c = gemm_class(*device_);
        const std::uint32_t per_k = matrix_slots(*device_, c.shape, c.units).value().per_k;
        way.tile = {.fragments_m = 1,
                    .fragments_n = 2,
                    .warps_m = 4,
                    .warps_n = 2,
                    .step_k = 8 * c.shape.k / per_k,
                    .stages = 3};
    }
    const std::vector<std::uint32_t> starts = {0, 5, 5, 72, 73};
    const std::uint64_t groups = starts.size() - 1, rows = starts.back(), more = 40;
    const TensorView offsets = words(starts);
    for (const auto& [n, k] : {std::pair<std::uint64_t, std::uint64_t>{48, 144}, {37, 8}}) {
        const TensorView a = matrix(DType::BF16, rows, rows + more, k),
                         d = matrix(DType::F32, rows, rows + more, n),
                         b = TensorView::contiguous(bytes(groups * n * k * 2), DType::BF16,
                                                    {groups, n, k});
        const auto layout = fp8::GroupLayout::prefix_sums(offsets, rows + more);
        const BufferView list = bytes(fp8::grouped_rows_bytes(*device_, layout));
        const TensorView one_a = TensorView::contiguous(a.buffer, DType::BF16, {rows, k}),
                         one_b = TensorView::contiguous(b.buffer, DType::BF16, {groups * n, k}),
                         one_d = matrix(DType::BF16, rows, rows, groups * n);
        run([&](Recording& r) {
            const auto grouped = fp8::make_grouped_rows(r, layout, {n, 0, 0, 0}, list);
            fp8::m_grouped_gemm_nt_contiguous(r, a, b, d, grouped, false, {}, way);
            fp8::gemm_nt(r, one_a, one_b, one_d, false, {}, way);
        });
    }
}

TEST_F(Fp8GuardPages, WeightGradients) {
    const std::vector<std::uint32_t> starts = {0, 5, 5, 133, 134};
    const std::uint64_t groups = starts.size() - 1, rows = starts.back(), m = 48, n = 144;
    const TensorView offsets = words(starts);
    const Recipe recipe{.blocks = Blocks::Columns128};
    const auto operand = [&](std::uint64_t columns) {
        return fp8::make_quantized(bytes(rows * columns),
                                   bytes(fp8::scales_bytes(recipe, {rows, columns}, groups)),
                                   recipe, {rows, columns}, offsets);
    };
    const Quantized a = operand(m), b = operand(n);
    const TensorView d =
        TensorView::contiguous(bytes(groups * m * n * 4), DType::F32, {groups, m, n});
    const auto layout = fp8::GroupLayout::prefix_sums(offsets, rows);
    const BufferView list = bytes(fp8::grouped_rows_bytes(*device_, layout)),
                     scratch = bytes(fp8::gemm_workspace_bytes(*device_, a, b));
    run([&](Recording& r) {
        const auto grouped = fp8::make_grouped_rows(r, layout, {}, list);
        fp8::k_grouped_gemm_tn(r, a, b, d, grouped, true, scratch);
    });
}

TEST_F(Fp8GuardPages, Rmsnorm) {
    for (const std::uint64_t more : {0u, 40u})
        for (const auto& [rows, columns] :
             {std::pair<std::uint64_t, std::uint64_t>{4, 16}, {4, 144}, {12, 528}, {4, 8704}})
            for (const DType dtype : {DType::F32, DType::BF16})
                for (const fp8::Form form :
                     {fp8::Form::Lanes, fp8::Form::Few, fp8::Form::Streams}) {
                    const std::uint64_t capacity = rows + more;
                    const TensorView count = words({static_cast<std::uint32_t>(rows)}),
                                     x = matrix(dtype, rows, capacity, columns)
                                             .with_row_count(count.buffer),
                                     y = matrix(dtype, rows, capacity, columns),
                                     gain = vector(columns, columns),
                                     inv_rms = vector(rows, capacity);
                    const Quantized q = quantized(rows, capacity, columns);
                    run([&](Recording& r) {
                        fp8::rmsnorm(r, x, gain, q, inv_rms, 1e-6f, y, form);
                    });
                }
}

TEST_F(Fp8GuardPages, Swiglu) {
    for (const std::uint64_t more : {0u, 40u})
        for (const auto& [rows, ffn] :
             {std::pair<std::uint64_t, std::uint64_t>{4, 128}, {12, 640}, {4, 2048}})
            for (const DType dtype : {DType::F32, DType::BF16})
                for (const fp8::Form form :
                     {fp8::Form::Lanes, fp8::Form::Few, fp8::Form::Streams}) {
                    const std::uint64_t capacity = rows + more;
                    const TensorView count = words({static_cast<std::uint32_t>(rows)}),
                                     gate_up = matrix(dtype, rows, capacity, 2 * ffn)
                                                   .with_row_count(count.buffer),
                                     d_hidden = matrix(dtype, rows, capacity, ffn),
                                     weight = vector(rows, capacity);
                    const fp8::SwigluGradients to{.quantized = quantized(rows, capacity, 2 * ffn),
                                                  .stored = matrix(dtype, rows, capacity, 2 * ffn),
                                                  .d_row_weight = vector(rows, capacity)};
                    Quantized codes = quantized(rows, capacity, 2 * ffn);
                    codes.codes.row_count = count.buffer;
                    const Quantized hidden = quantized(rows, capacity, ffn);
                    run([&](Recording& r) { fp8::swiglu(r, gate_up, weight, hidden, form); });
                    run([&](Recording& r) { fp8::swiglu(r, codes, weight, hidden, form); });
                    run([&](Recording& r) {
                        fp8::swiglu_dgrad(r, d_hidden, gate_up, weight, to, form);
                    });
                    run([&](Recording& r) {
                        fp8::swiglu_dgrad(r, d_hidden, codes, weight, to, form);
                    });
                }
}

} // namespace
} // namespace bellows
