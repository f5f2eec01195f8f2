// SPDX-License-Identifier: MIT
#include "fp8_quantize/workloads.hpp"

namespace bellows::bench {

namespace {

using fp8::Quantized;
using fp8::Recipe;

double sigmoid(double x) {
    return 1 / (1 + std::exp(-x));
}

QuantizeShape twice_as_wide(const QuantizeShape& shape) {
    return {shape.batch, shape.rows, 2 * shape.columns};
}

/// gate_up as codes or as a tensor.
struct GateUp {
    Quantized codes;
    TensorView plain;
    Rows rows;
    double bytes;

    GateUp(OpData& data, const QuantizeShape& shape, const Recipe& recipe, DType act, bool coded) {
        if (coded) {
            codes = quantized(data, recipe, shape);
            rows = rows_of(data, codes);
            bytes = bytes_of(codes);
        } else {
            plain = repeated(data, act, shape);
            rows = rows_of(data, plain);
            bytes = bytes_of({plain});
        }
    }
};

} // namespace

Workload rmsnorm_quantized(OpData& data, const QuantizeShape& shape, const Recipe& recipe,
                           DType act) {
    const TensorView x = repeated(data, act, shape),
                     gain = data.random(DType::F32, {shape.columns}, 0.5, 1.5),
                     inv_rms = data.empty(DType::F32, {shape.rows});
    const Quantized q = empty_codes(data, recipe, shape);
    const Rows expected = [=, &data](std::uint64_t first, std::uint64_t) {
        auto y = rows_of(data, x)(first, 1);
        const auto gains = data.read(gain);
        double squares = 0;
        for (const double value : y)
            squares += value * value;
        const double inverse = 1 / std::sqrt(squares / static_cast<double>(shape.columns) + 1e-6);
        for (std::uint64_t c = 0; c < shape.columns; ++c)
            y[c] *= inverse * gains[c];
        return y;
    };
    return {[=](Recording& r) { fp8::rmsnorm(r, x, gain, q, inv_rms, 1e-6f); },
            [=, &data] { return check_quantized(data, q, expected); },
            bytes_of({x, gain, inv_rms}) + bytes_of(q), 0};
}

Workload swiglu_quantized(OpData& data, const QuantizeShape& shape, const Recipe& recipe, DType act,
                          bool from_codes) {
    const GateUp gate_up(data, twice_as_wide(shape), recipe, act, from_codes);
    const TensorView weight = data.random(DType::F32, {shape.rows}, 0.1f, 1);
    const Quantized q = empty_codes(data, recipe, shape);
    const Rows expected = [=, &data](std::uint64_t first, std::uint64_t) {
        const auto x = gate_up.rows(first, 1), w = data.read(weight.rows(first, 1));
        std::vector<double> hidden(shape.columns);
        for (std::uint64_t c = 0; c < shape.columns; ++c)
            hidden[c] = x[c] * sigmoid(x[c]) * x[shape.columns + c] * w[0];
        return hidden;
    };
    return {[=](Recording& r) {
                if (from_codes)
                    fp8::swiglu(r, gate_up.codes, weight, q);
                else
                    fp8::swiglu(r, gate_up.plain, weight, q);
            },
            [=, &data] { return check_quantized(data, q, expected); },
            gate_up.bytes + bytes_of({weight}) + bytes_of(q), 0};
}

Workload swiglu_dgrad_quantized(OpData& data, const QuantizeShape& shape, const Recipe& recipe,
                                DType act, bool from_codes) {
    const GateUp gate_up(data, twice_as_wide(shape), recipe, act, from_codes);
    const TensorView weight = data.random(DType::F32, {shape.rows}, 0.1f, 1),
                     d_hidden = repeated(data, act, shape),
                     d_weight = data.empty(DType::F32, {shape.rows});
    const fp8::SwigluGradients to{.quantized = empty_codes(data, recipe, twice_as_wide(shape)),
                                  .d_row_weight = d_weight};
    const Rows expected = [=, &data](std::uint64_t first, std::uint64_t) {
        const auto x = gate_up.rows(first, 1), d = rows_of(data, d_hidden)(first, 1),
                   w = data.read(weight.rows(first, 1));
        std::vector<double> gradient(2 * shape.columns);
        for (std::uint64_t c = 0; c < shape.columns; ++c) {
            const double s = sigmoid(x[c]), dy = d[c] * w[0];
            gradient[c] = dy * x[shape.columns + c] * s * (1 + x[c] * (1 - s));
            gradient[shape.columns + c] = dy * x[c] * s;
        }
        return gradient;
    };
    const auto check_weights = [=, &data]() -> std::string {
        const auto sums = data.read(d_weight);
        for (const std::uint64_t row : samples(shape.rows)) {
            const auto x = gate_up.rows(row, 1), d = rows_of(data, d_hidden)(row, 1);
            double sum = 0, magnitudes = 0;
            for (std::uint64_t c = 0; c < shape.columns; ++c) {
                const double term = d[c] * x[c] * sigmoid(x[c]) * x[shape.columns + c];
                sum += term;
                magnitudes += std::abs(term);
            }
            if (!(std::abs(sums[row] - sum) <= 1e-5 * magnitudes))
                return compare("d_row_weight", row, sums[row], sum, 0, 0);
        }
        return "";
    };
    return {[=](Recording& r) {
                if (from_codes)
                    fp8::swiglu_dgrad(r, d_hidden, gate_up.codes, weight, to);
                else
                    fp8::swiglu_dgrad(r, d_hidden, gate_up.plain, weight, to);
            },
            [=, &data] {
                const std::string wrong = check_quantized(data, to.quantized, expected);
                return wrong.empty() ? check_weights() : wrong;
            },
            gate_up.bytes + bytes_of({weight, d_hidden, d_weight}) + bytes_of(to.quantized), 0};
}

} // namespace bellows::bench
