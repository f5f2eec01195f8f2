// SPDX-License-Identifier: MIT
// FP8: quantisation by every recipe against its definition, bit by bit, and products of quantised
// operands, dense and grouped, against f64 products of the values that their codes stand for.
#include "verify/reference/fp8.hpp"
#include "verify/checks/families.hpp"
#include "verify/checks/product_bound.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/fp8/gemm.hpp>
#include <bellows/fp8/quantize.hpp>

namespace bellows::checks {

namespace {

using fp8::Blocks;
using fp8::Format;
using fp8::Quantized;
using fp8::Recipe;
using fp8::ScaleRule;
using reference::Vector;

constexpr std::array kBlocks = {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128,
                                Blocks::PerTensor, Blocks::MX32};

reference::Fp8Format definition(Format format) {
    return format == Format::E4M3 ? reference::Fp8Format::E4M3 : reference::Fp8Format::E5M2;
}

/// A quantised matrix on the device, [rows, columns] or [batch, rows, columns].
struct Fp8Matrix {
    Buffer memory;
    Quantized quantized;
    std::uint64_t batch, rows, columns;
    std::vector<std::uint32_t> offsets; ///< of groups; empty without
};

Fp8Matrix fp8_matrix(const OpRig& rig, const Recipe& recipe, std::uint64_t batch,
                     std::uint64_t rows, std::uint64_t columns,
                     const std::vector<std::uint32_t>& offsets = {},
                     const TensorView& offsets_view = {}) {
    const std::uint64_t groups = offsets.empty() ? 0 : offsets.size() - 1;
    const auto make = [&](std::initializer_list<std::uint64_t> extents) {
        Buffer memory = rig.workspace(fp8::quantized_bytes(recipe, extents, groups));
        const Quantized q = fp8::make_quantized(memory.view(), recipe, extents, offsets_view);
        return Fp8Matrix{std::move(memory), q, batch, rows, columns, offsets};
    };
    return batch == 1 ? make({rows, columns}) : make({batch, rows, columns});
}

/// The codes, without what stands behind rows.
std::vector<std::uint8_t> codes_of(const OpRig& rig, const Fp8Matrix& m) {
    const TensorView& view = m.quantized.codes;
    const std::uint64_t stride = view.stride[view.rank - 2];
    std::vector<std::uint8_t> all(round_up(m.batch * m.rows * stride, 4)), codes;
    rig.device().download({view.buffer.resource, view.buffer.offset, all.size()},
                          std::span<std::uint8_t>(all));
    for (std::uint64_t row = 0; row < m.batch * m.rows; ++row)
        for (std::uint64_t column = 0; column < m.columns; ++column)
            codes.push_back(all[row * stride + column]);
    return codes;
}

/// The scale of each element. Scales of bytes are powers of two.
std::vector<float> scales_of(const OpRig& rig, const Fp8Matrix& m) {
    const TensorView& view = m.quantized.scales;
    const Blocks blocks = m.quantized.recipe.blocks;
    const std::uint64_t stride = view.rank < 2 ? 1 : view.stride[view.rank - 2];
    std::vector<std::byte> bytes(round_up(view.buffer.bytes, 4));
    rig.device().download({view.buffer.resource, view.buffer.offset, bytes.size()},
                          std::span<std::byte>(bytes));
    const auto at = [&](std::uint64_t index) {
        if (view.dtype == DType::U8)
            return std::ldexp(1.0f, static_cast<int>(bytes[index]) - 127);
        float scale = 0;
        std::memcpy(&scale, &bytes[4 * index], 4);
        return scale;
    };
    std::vector<float> scales;
    for (std::uint64_t b = 0; b < m.batch; ++b)
        for (std::uint64_t row = 0; row < m.rows; ++row) {
            std::size_t group = 0;
            while (group + 2 < m.offsets.size() && m.offsets[group + 1] <= row)
                ++group;
            const bool grouped = !m.offsets.empty();
            const std::uint64_t by_128 =
                grouped ? m.offsets[group] / 128 + group + (row - m.offsets[group]) / 128
                        : row / 128;
            const std::uint64_t rows_of_scales = view.rank == 3 ? view.extent[1] : 0;
            const bool each_row = blocks == Blocks::Rows128 || blocks == Blocks::MX32;
            const std::uint64_t line = b * rows_of_scales + (each_row ? row : by_128);
            for (std::uint64_t column = 0; column < m.columns; ++column)
                scales.push_back(
                    blocks == Blocks::PerTensor ? at(0)
                    : blocks == Blocks::Columns128
                        ? at(line * stride + column)
                        : at(line * stride + column / (blocks == Blocks::MX32 ? 32 : 128)));
        }
    return scales;
}

/// What the codes stand for.
Vector values_of(const OpRig& rig, const Fp8Matrix& m) {
    const std::vector<std::uint8_t> codes = codes_of(rig, m);
    const std::vector<float> scales = scales_of(rig, m);
    Vector values;
    for (std::size_t i = 0; i < codes.size(); ++i)
        values.push_back(reference::fp8_value(definition(m.quantized.recipe.format), codes[i]) *
                         static_cast<double>(scales[i]));
    return values;
}

/// Of many binades, with blocks of zeros and of tiny and large values.
std::vector<float> wide_values(DType dtype, std::uint64_t rows, std::uint64_t columns,
                               std::uint64_t seed) {
    reference::Random random(seed);
    std::vector<float> values(rows * columns);
    for (std::uint64_t i = 0; i < values.size(); ++i) {
        const std::uint64_t kind = (i / columns / 8 * 7 + i % columns / 32 * 3 + seed) % 6;
        const int exponent = static_cast<int>(random.below(24)) - 20;
        const double value = std::ldexp(random.uniform(-1, 1), exponent);
        const double scaled = kind == 1   ? 0
                              : kind == 2 ? value * 1e-7
                              : kind == 3 ? value * 0x1p120
                                          : value;
        values[i] = dtype == DType::BF16 ? reference::round_to_bf16(static_cast<float>(scaled))
                                         : static_cast<float>(scaled);
    }
    return values;
}

struct Expected {
    std::vector<std::uint8_t> codes;
    std::vector<float> scales; ///< of each element
};

Expected quantised(const std::vector<float>& x, std::uint64_t rows, std::uint64_t columns,
                   const Recipe& recipe) {
    Expected expected{std::vector<std::uint8_t>(x.size()), std::vector<float>(x.size())};
    const bool tensor = recipe.blocks == Blocks::PerTensor;
    const bool tall = recipe.blocks == Blocks::Columns128 || recipe.blocks == Blocks::Blocks128;
    const std::uint64_t height = tensor ? rows : tall ? 128 : 1;
    const std::uint64_t width = tensor                                ? columns
                                : recipe.blocks == Blocks::MX32       ? 32
                                : recipe.blocks == Blocks::Columns128 ? 1
                                                                      : 128;
    for (std::uint64_t row = 0; row < rows; row += height)
        for (std::uint64_t column = 0; column < columns; column += width) {
            const reference::Fp8Block block{row, std::min(row + height, rows), column,
                                            std::min(column + width, columns)};
            const float scale = reference::fp8_quantize_block(
                x, columns, block, definition(recipe.format),
                recipe.rule == ScaleRule::F32 ? reference::Fp8Rule::F32
                                              : reference::Fp8Rule::PowerOfTwo,
                expected.codes);
            for (std::uint64_t r = block.row; r < block.row_end; ++r)
                for (std::uint64_t c = block.column; c < block.column_end; ++c)
                    expected.scales[r * columns + c] = scale;
        }
    return expected;
}

void check_recipe(Check& check, const OpRig& rig, DType dtype, const Recipe& recipe) {
    constexpr std::uint64_t kRows = 133, kColumns = 168; // blocks of each kind end within them
    check.begin_case(describe(recipe) + " of " + by(kRows, kColumns));
    const auto values = wide_values(dtype, kRows, kColumns, 1);
    const OpTensor x = rig.tensor(dtype, {kRows, kColumns}, values);
    const Fp8Matrix q = fp8_matrix(rig, recipe, 1, kRows, kColumns);
    const OpTensor y = rig.result(DType::F32, {kRows, kColumns});
    rig.run([&](Recording& recording) {
        fp8::quantize(recording, x, q.quantized);
        fp8::dequantize(recording, q.quantized, y);
    });
    const Expected expected = quantised(values, kRows, kColumns, recipe);
    check.exact("codes", codes_of(rig, q), expected.codes);
    check.exact("scales", scales_of(rig, q), expected.scales);
    std::vector<float> back;
    for (const double value : values_of(rig, q))
        back.push_back(static_cast<float>(value));
    check.exact("back", rig.read(y), back);
}

/// Each recipe is a shader of its own, which takes a CPU driver a second or two to compile.
bool is_quick(DType dtype, const Recipe& recipe) {
    const bool usual = recipe.format == Format::E4M3 && recipe.rule == ScaleRule::PowerOfTwo;
    return dtype == DType::F32
               ? usual || recipe.blocks == Blocks::Rows128
               : usual && recipe.blocks != Blocks::MX32 && recipe.blocks != Blocks::PerTensor;
}

void check_quantisation(Check& check, const OpRig& rig, DType dtype, Depth depth) {
    for (const Blocks blocks : kBlocks)
        for (const Format format : {Format::E4M3, Format::E5M2})
            for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32}) {
                const Recipe recipe{blocks, format, rule};
                if (blocks == Blocks::MX32 && rule != ScaleRule::PowerOfTwo)
                    continue;
                if (depth == Depth::Full || is_quick(dtype, recipe))
                    check_recipe(check, rig, dtype, recipe);
            }
}

/// What is quantised has rows of a multiple of 8 elements.
OpTensor padded(const OpRig& rig, DType dtype, std::uint64_t rows, std::uint64_t columns,
                const std::vector<float>& values) {
    OpTensor tensor = rig.head(dtype, {rows, round_up(columns, 8)}, columns);
    rig.write(tensor.view, values);
    return tensor;
}

struct ProductCase {
    std::uint64_t m, n, k;
    ScaleRule rule;
    DType result;
};

constexpr auto kProductCases = std::to_array<ProductCase>({
    {1, 2, 16, ScaleRule::PowerOfTwo, DType::F32},
    {33, 40, 200, ScaleRule::PowerOfTwo, DType::BF16},
    {33, 40, 200, ScaleRule::F32, DType::F32},
    {130, 136, 264, ScaleRule::PowerOfTwo, DType::F32},
});

const char* name_of(GemmForm form) {
    return form == GemmForm::NT   ? "forward (nt)"
           : form == GemmForm::NN ? "input gradient (nn)"
                                  : "weight gradient (tn)";
}

Vector product(GemmForm form, const Vector& a, const Vector& b, const ProductCase& c) {
    return form == GemmForm::NT   ? reference::gemm_nt(a, b, c.m, c.n, c.k)
           : form == GemmForm::NN ? reference::gemm_nn(a, b, c.m, c.n, c.k)
                                  : reference::gemm_tn(a, b, c.m, c.n, c.k);
}

/// a as activations are quantised, b as weights, of a weight's gradient both by columns; of bf16 b
/// is what a layer without FP8 weights has.
void check_product(Check& check, const OpRig& rig, GemmForm form, const ProductCase& c,
                   bool bf16_b) {
    const bool tn = form == GemmForm::TN;
    const std::uint64_t a_rows = tn ? c.k : c.m, a_columns = tn ? c.m : c.k;
    const std::uint64_t b_rows = form == GemmForm::NT ? c.n : c.k,
                        b_columns = form == GemmForm::NT ? c.k : c.n;
    const Fp8Matrix a =
        fp8_matrix(rig, {tn ? Blocks::Columns128 : Blocks::Rows128, Format::E4M3, c.rule}, 1,
                   a_rows, a_columns);
    const Fp8Matrix b =
        fp8_matrix(rig, {tn ? Blocks::Columns128 : Blocks::Blocks128, Format::E4M3, c.rule}, 1,
                   b_rows, b_columns);
    const DType b_storage = bf16_b ? DType::BF16 : DType::F32;
    const auto b_values = OpRig::random(b_storage, b_rows * b_columns, 2);
    const OpTensor x = padded(rig, DType::F32, a_rows, a_columns,
                              OpRig::random(DType::F32, a_rows * a_columns, 1));
    const OpTensor w = padded(rig, b_storage, b_rows, b_columns, b_values);
    const OpTensor d = rig.result(c.result, {c.m, c.n});
    const fp8::Operand of_a = a.quantized;
    const fp8::Operand of_b = bf16_b ? fp8::Operand(w.view) : fp8::Operand(b.quantized);
    const Buffer scratch = rig.workspace(fp8::gemm_workspace_bytes(rig.device(), of_a, of_b));
    const auto gemm = form == GemmForm::NT   ? fp8::gemm_nt
                      : form == GemmForm::NN ? fp8::gemm_nn
                                             : fp8::gemm_tn;
    rig.run([&](Recording& recording) {
        fp8::quantize(recording, x, a.quantized);
        if (!bf16_b)
            fp8::quantize(recording, w, b.quantized);
        gemm(recording, of_a, of_b, d, false, scratch.view(), {});
    });
    const Vector av = values_of(rig, a),
                 bv = bf16_b ? reference::to_double(b_values) : values_of(rig, b);
    check.elements(name_of(form), rig.read(d), product(form, av, bv, c), {c.m, c.n},
                   product_bound(c.k,
                                 product(form, reference::absolute(av), reference::absolute(bv), c),
                                 c.result));
    check.untouched(name_of(form), rig.outside(d));
}

void check_products(Check& check, const OpRig& rig) {
    for (const ProductCase& c : kProductCases)
        for (const bool bf16_b : {false, true}) {
            check.begin_case(by(c.m, c.n) + " x " + std::to_string(c.k) + ", " +
                             fp8::to_string(c.rule) + " scales, B " + (bf16_b ? "bf16" : "fp8"));
            for (const GemmForm form : {GemmForm::NT, GemmForm::NN, GemmForm::TN})
                check_product(check, rig, form, c, bf16_b);
        }
}

struct GroupCase {
    std::vector<std::uint32_t> rows;
    std::uint64_t n, k;
};

/// Rows of groups one after the other: forward and both gradients of experts.
void check_group_products(Check& check, const OpRig& rig, const GroupCase& c) {
    const std::uint64_t groups = c.rows.size();
    check.begin_case(std::to_string(groups) + " groups, N " + std::to_string(c.n) + ", K " +
                     std::to_string(c.k));
    std::vector<std::uint32_t> offsets(groups + 1, 0);
    for (std::size_t g = 0; g < groups; ++g)
        offsets[g + 1] = offsets[g] + c.rows[g];
    const std::uint64_t rows = offsets.back();
    const OpTensor offsets_t = rig.tensor(DType::U32, {groups + 1}, offsets);
    const auto by_groups = [&](Blocks blocks, std::uint64_t columns) {
        const bool tall = blocks == Blocks::Columns128;
        return fp8_matrix(rig, {.blocks = blocks}, 1, rows, columns,
                          tall ? offsets : std::vector<std::uint32_t>{},
                          tall ? offsets_t.view : TensorView{});
    };
    const Fp8Matrix x = by_groups(Blocks::Rows128, c.k), dy = by_groups(Blocks::Rows128, c.n);
    const Fp8Matrix x_tall = by_groups(Blocks::Columns128, c.k),
                    dy_tall = by_groups(Blocks::Columns128, c.n);
    const Fp8Matrix w = fp8_matrix(rig, {.blocks = Blocks::Blocks128}, groups, c.n, c.k);
    const OpTensor x_values =
        rig.tensor(DType::BF16, {rows, c.k}, OpRig::random(DType::BF16, rows * c.k, 1));
    const OpTensor dy_values =
        rig.tensor(DType::BF16, {rows, c.n}, OpRig::random(DType::BF16, rows * c.n, 2));
    const OpTensor w_values = rig.tensor(DType::F32, {groups, c.n, c.k},
                                         OpRig::random(DType::F32, groups * c.n * c.k, 3));
    const OpTensor y = rig.result(DType::BF16, {rows, c.n});
    const OpTensor dx = rig.result(DType::BF16, {rows, c.k});
    const OpTensor dw = rig.result(DType::F32, {groups, c.n, c.k});
    const auto layout = fp8::GroupLayout::prefix_sums(offsets_t, rows);
    const Buffer list = rig.workspace(fp8::grouped_rows_bytes(rig.device(), layout));
    std::uint64_t bytes = 0;
    for (const auto& [a, b] : {std::pair(&x, &w), std::pair(&dy, &w), std::pair(&dy_tall, &x_tall)})
        bytes =
            std::max(bytes, fp8::gemm_workspace_bytes(rig.device(), a->quantized, b->quantized));
    const Buffer scratch = rig.workspace(bytes);
    rig.run([&](Recording& recording) {
        for (const auto& [from, to] :
             {std::pair(&x_values, &x), std::pair(&x_values, &x_tall), std::pair(&dy_values, &dy),
              std::pair(&dy_values, &dy_tall), std::pair(&w_values, &w)})
            fp8::quantize(recording, *from, to->quantized);
        const auto listed =
            fp8::make_grouped_rows(recording, layout, {c.n, c.k, 0, 0}, list.view());
        fp8::m_grouped_gemm_nt_contiguous(recording, x.quantized, w.quantized, y, listed, false,
                                          scratch.view());
        fp8::m_grouped_gemm_nn_contiguous(recording, dy.quantized, w.quantized, dx, listed, false,
                                          scratch.view());
        fp8::k_grouped_gemm_tn(recording, dy_tall.quantized, x_tall.quantized, dw, listed, false,
                               scratch.view());
    });
    const auto products = [&](GemmForm form, const Vector& a, const Vector& b) {
        Vector all;
        for (std::size_t g = 0; g < groups; ++g) {
            const std::uint64_t first = offsets[g], count = c.rows[g];
            const auto part = [&](const Vector& of, std::uint64_t columns) {
                return reference::View(of).subspan(first * columns, count * columns);
            };
            const auto weights = reference::View(b);
            const Vector one =
                form == GemmForm::NT
                    ? reference::gemm_nt(part(a, c.k), weights.subspan(g * c.n * c.k, c.n * c.k),
                                         count, c.n, c.k)
                : form == GemmForm::NN
                    ? reference::gemm_nn(part(a, c.n), weights.subspan(g * c.n * c.k, c.n * c.k),
                                         count, c.k, c.n)
                    : reference::gemm_tn(part(a, c.n), part(b, c.k), c.n, c.k, count);
            all.insert(all.end(), one.begin(), one.end());
        }
        return all;
    };
    const auto compare = [&](GemmForm form, const OpTensor& d, const Fp8Matrix& a,
                             const Fp8Matrix& b, std::uint64_t terms) {
        const Vector av = values_of(rig, a), bv = values_of(rig, b);
        check.elements(
            name_of(form), rig.read(d), products(form, av, bv), {},
            product_bound(terms, products(form, reference::absolute(av), reference::absolute(bv)),
                          d.view.dtype));
    };
    compare(GemmForm::NT, y, x, w, c.k);
    compare(GemmForm::NN, dx, dy, w, c.n);
    compare(GemmForm::TN, dw, dy_tall, x_tall, rows);
}

} // namespace

void add_fp8_checks(std::vector<OpCheck>& checks, Depth depth) {
    for (const DType dtype : {DType::F32, DType::BF16})
        checks.push_back({"fp8", with_storage("quantise", dtype),
                          [dtype, depth](Check& check, const OpRig& rig) {
                              check_quantisation(check, rig, dtype, depth);
                          }});
    checks.push_back({.group = "fp8",
                      .what = "products",
                      .body = check_products,
                      .depends_on_gemm_class = true});
    checks.push_back({.group = "fp8",
                      .what = "grouped products",
                      .body =
                          [](Check& check, const OpRig& rig) {
                              for (const GroupCase& c :
                                   {GroupCase{{5, 0, 33, 1, 0, 64}, 72, 136},
                                    GroupCase{{130, 3}, 136, 72}, GroupCase{{0, 0}, 16, 32}})
                                  check_group_products(check, rig, c);
                          },
                      .depends_on_gemm_class = true});
}

} // namespace bellows::checks
