// SPDX-License-Identifier: MIT
#include "fp8_quantize/workloads.hpp"

#include <algorithm>

namespace bellows::bench {

namespace {

using fp8::Blocks;
using fp8::Quantized;
using fp8::Recipe;

double largest_of(const OpData& data, const TensorView& x) {
    double most = 0; // repeated() has drawn no more rows than these
    const std::uint64_t columns = x.extent[x.rank - 1], rows = x.num_elements() / columns;
    for (const double value : rows_of(data, x)(0, std::min<std::uint64_t>(rows, 256)))
        most = std::max(most, std::abs(value));
    return most;
}

Workload quantize(OpData& data, const QuantizeShape& shape, const Recipe& recipe, DType act) {
    const TensorView x = repeated(data, act, shape);
    const Quantized q = empty_codes(data, recipe, shape);
    return {[=](Recording& r) { fp8::quantize(r, x, q); },
            [=, &data] {
                const bool whole = recipe.blocks == Blocks::PerTensor;
                return check_quantized(data, q, rows_of(data, x), whole ? largest_of(data, x) : 0);
            },
            bytes_of({x}) + bytes_of(q), 0};
}

Recipe columns_like(const Recipe& rows) {
    return {Blocks::Columns128, rows.format, rows.rule};
}

Workload rows_and_columns(OpData& data, const QuantizeShape& shape, const Recipe& recipe,
                          DType act) {
    const TensorView x = repeated(data, act, shape);
    const Quantized rows = empty_codes(data, recipe, shape),
                    columns = empty_codes(data, columns_like(recipe), shape);
    return {[=](Recording& r) { fp8::quantize_rows_and_columns(r, x, rows, columns); },
            [=, &data] {
                const Rows expected = rows_of(data, x);
                const std::string wrong = check_quantized(data, rows, expected);
                return wrong.empty() ? check_quantized(data, columns, expected) : wrong;
            },
            bytes_of({x}) + bytes_of(rows) + bytes_of(columns), 0};
}

Workload requantize(OpData& data, const QuantizeShape& shape, const Recipe& recipe) {
    const Quantized rows = quantized(data, recipe, shape),
                    columns = empty_codes(data, columns_like(recipe), shape);
    return {[=](Recording& r) { fp8::requantize(r, rows, columns); },
            [=, &data] { return check_quantized(data, columns, rows_of(data, rows)); },
            bytes_of(rows) + bytes_of(columns), 0};
}

/// Columns whose codes stand transposed, and how they are checked: turned back to rows.
struct TransposedColumns {
    fp8::Transposed to;
    TensorView turned_back;

    TransposedColumns(OpData& data, const QuantizeShape& shape, const Recipe& recipe)
        : to(fp8::make_transposed(
              data.bytes(fp8::transposed_bytes(recipe, {shape.rows, shape.columns})), recipe,
              {shape.rows, shape.columns})),
          turned_back(data.empty(to.codes.dtype, {to.codes.extent[1], shape.columns})) {}

    std::string check(const OpData& data, const Rows& expected) const {
        Recording recording(data.device(), QueueRole::Compute, "codes turned back");
        fp8::transpose_codes(recording, to.codes, turned_back);
        data.device().submit(recording).wait();
        return check_quantized(data, {turned_back.rows(0, to.rows), to.scales, to.recipe, {}},
                               expected);
    }
    double bytes() const { return bytes_of({to.codes, to.scales}); }
};

Workload quantize_transposed(OpData& data, const QuantizeShape& shape, const Recipe& recipe,
                             DType act) {
    const TensorView x = repeated(data, act, shape);
    const TransposedColumns columns(data, shape, columns_like(recipe));
    return {[=](Recording& r) { fp8::quantize(r, x, columns.to); },
            [=, &data] { return columns.check(data, rows_of(data, x)); },
            bytes_of({x}) + columns.bytes(), 0};
}

Workload requantize_transposed(OpData& data, const QuantizeShape& shape, const Recipe& recipe) {
    const Quantized rows = quantized(data, recipe, shape);
    const TransposedColumns columns(data, shape, columns_like(recipe));
    return {[=](Recording& r) { fp8::requantize(r, rows, columns.to); },
            [=, &data] { return columns.check(data, rows_of(data, rows)); },
            bytes_of(rows) + columns.bytes(), 0};
}

/// Times how weights' codes [N, K] become codes [K, N].
Workload transpose_codes(OpData& data, const QuantizeShape& shape, const Recipe& recipe) {
    const Quantized weights = quantized(data, recipe, shape);
    const TensorView turned =
        data.empty(weights.codes.dtype, {shape.batch, shape.columns, shape.rows});
    const auto verify = [=, &data]() -> std::string {
        const std::uint64_t size = shape.rows * shape.columns;
        for (const std::uint64_t g : samples(shape.batch)) {
            std::vector<std::uint8_t> from(size), to(size);
            data.device().download(weights.codes.buffer.sub(g * size, size),
                                   std::span<std::uint8_t>(from));
            data.device().download(turned.buffer.sub(g * size, size), std::span<std::uint8_t>(to));
            for (const std::uint64_t row : samples(shape.columns))
                for (std::uint64_t c = 0; c < shape.rows; ++c)
                    if (to[row * shape.rows + c] != from[c * shape.columns + row])
                        return "the code at " + std::to_string(row) + ", " + std::to_string(c) +
                               " of matrix " + std::to_string(g) + " is " +
                               std::to_string(to[row * shape.rows + c]) + ", expected " +
                               std::to_string(from[c * shape.columns + row]);
        }
        return "";
    };
    return {[=](Recording& r) { fp8::transpose_codes(r, weights.codes, turned); }, verify,
            bytes_of({weights.codes, turned}), 0};
}

/// What is wrong with samples of y, which are to be the values of q but for `rounding`, relative.
std::string check_values(const OpData& data, const TensorView& y, const Quantized& q,
                         const QuantizeShape& shape, double rounding) {
    for (const std::uint64_t row : samples(shape.all_rows())) {
        const auto actual = rows_of(data, y)(row, 1), expected = rows_of(data, q)(row, 1);
        for (std::uint64_t c = 0; c < shape.columns; ++c)
            if (const std::string wrong =
                    compare("y", row * shape.columns + c, actual[c], expected[c], rounding, 0);
                !wrong.empty())
                return wrong;
    }
    return "";
}

/// Straight to the values of the columns, which must be those of the codes.
Workload requantize_decoded(OpData& data, const QuantizeShape& shape, const Recipe& recipe) {
    const Quantized rows = quantized(data, recipe, shape),
                    columns = empty_codes(data, columns_like(recipe), shape);
    const fp8::Decoded y =
        fp8::make_decoded(data.bytes(fp8::decoded_bytes({shape.rows, shape.columns})),
                          columns.recipe, {shape.rows, shape.columns});
    const auto verify = [=, &data] {
        Recording recording(data.device(), QueueRole::Compute, "codes of the columns");
        fp8::requantize(recording, rows, columns);
        data.device().submit(recording).wait();
        return check_values(data, y.values, columns, shape, 0);
    };
    return {[=](Recording& r) { fp8::requantize(r, rows, y); }, verify,
            bytes_of(rows) + bytes_of({y.values}), 0};
}

Workload dequantize(OpData& data, const QuantizeShape& shape, const Recipe& recipe, DType act) {
    const Quantized q = quantized(data, recipe, shape);
    const TensorView y = shape.batch == 1
                             ? data.empty(act, {shape.rows, shape.columns})
                             : data.empty(act, {shape.batch, shape.rows, shape.columns});
    const auto verify = [=, &data] {
        return check_values(data, y, q, shape, act == DType::BF16 ? 0x1p-8 : 1e-7);
    };
    return {[=](Recording& r) { fp8::dequantize(r, q, y); }, verify, bytes_of({y}) + bytes_of(q),
            0};
}

} // namespace

std::string name_of(const QuantizeShape& s) {
    return (s.batch == 1 ? "" : std::to_string(s.batch) + "x") + std::to_string(s.rows) + "x" +
           std::to_string(s.columns);
}

std::vector<QuantizeOp> quantize_ops(const QuantizeShape& shape, fp8::Format format,
                                     fp8::ScaleRule rule, const std::vector<DType>& storage) {
    std::vector<QuantizeOp> ops;
    const auto add = [&](const std::string& name, auto make, auto... arguments) {
        ops.push_back({name, [=](OpData& data) { return make(data, shape, arguments...); }});
    };
    const std::vector<Blocks> all =
        shape.batch == 1
            ? std::vector{Blocks::Rows128, Blocks::Columns128, Blocks::PerTensor, Blocks::MX32}
            : std::vector{Blocks::Blocks128};
    for (const Blocks blocks : all)
        for (const DType act : storage) {
            if (blocks == Blocks::MX32 && rule == fp8::ScaleRule::F32)
                continue;
            std::string name = std::string(to_string(blocks)) + "/" + to_string(act);
            std::replace(name.begin(), name.end(), ' ', '_');
            const Recipe recipe{blocks, format, rule};
            add("quantize/" + name, quantize, recipe, act);
            add("dequantize/" + name, dequantize, recipe, act);
        }
    if (shape.batch != 1) {
        add("transpose_codes", transpose_codes, Recipe{Blocks::Blocks128, format, rule});
        return ops;
    }
    const Recipe recipe{Blocks::Rows128, format, rule};
    add("requantize", requantize, recipe);
    add("requantize_transposed", requantize_transposed, recipe);
    if (rule == fp8::ScaleRule::PowerOfTwo)
        add("requantize_decoded", requantize_decoded, recipe);
    for (const DType act : storage) {
        const std::string name = std::string("/") + to_string(act);
        add("rows_and_columns" + name, rows_and_columns, recipe, act);
        add("quantize_transposed" + name, quantize_transposed, recipe, act);
        add("rmsnorm" + name, rmsnorm_quantized, recipe, act);
        add("swiglu" + name, swiglu_quantized, recipe, act, false);
        add("swiglu_dgrad" + name, swiglu_dgrad_quantized, recipe, act, false);
        add("swiglu_dgrad_of_codes" + name, swiglu_dgrad_quantized, recipe, act, true);
    }
    add("swiglu_of_codes", swiglu_quantized, recipe, DType::F32, true);
    return ops;
}

} // namespace bellows::bench
