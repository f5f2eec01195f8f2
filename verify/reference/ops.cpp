// SPDX-License-Identifier: MIT
#include "verify/reference/ops.hpp"

#include <cmath>
#include <stdexcept>

namespace bellows::reference {

RmsNorm rmsnorm_forward(View x, View gain, std::size_t rows, std::size_t columns, double eps) {
    require_size("rmsnorm: x", x.size(), rows * columns);
    require_size("rmsnorm: gain", gain.size(), columns);
    RmsNorm out{Vector(x.size()), Vector(rows)};
    for (std::size_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (std::size_t c = 0; c < columns; ++c)
            squares += x[r * columns + c] * x[r * columns + c];
        out.inv_rms[r] = 1 / std::sqrt(squares / static_cast<double>(columns) + eps);
        for (std::size_t c = 0; c < columns; ++c)
            out.y[r * columns + c] = x[r * columns + c] * out.inv_rms[r] * gain[c];
    }
    return out;
}

Vector rmsnorm_input_grad(View dy, View x, View gain, View inv_rms, std::size_t rows,
                          std::size_t columns) {
    require_size("rmsnorm: dy", dy.size(), rows * columns);
    Vector dx(x.size());
    for (std::size_t r = 0; r < rows; ++r) {
        const std::size_t at = r * columns;
        double projection = 0; // mean of (dy · gain · normalised x)
        for (std::size_t c = 0; c < columns; ++c)
            projection += dy[at + c] * gain[c] * x[at + c] * inv_rms[r];
        projection /= static_cast<double>(columns);
        for (std::size_t c = 0; c < columns; ++c)
            dx[at + c] = inv_rms[r] * (dy[at + c] * gain[c] - x[at + c] * inv_rms[r] * projection);
    }
    return dx;
}

Vector rmsnorm_gain_grad(View dy, View x, View inv_rms, std::size_t rows, std::size_t columns) {
    Vector dgain(columns, 0.0);
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < columns; ++c)
            dgain[c] += dy[r * columns + c] * x[r * columns + c] * inv_rms[r];
    return dgain;
}

Vector rope(View x, std::span<const std::int64_t> positions, const RopeShape& shape, bool inverse) {
    require_size("rope: x", x.size(), shape.rows * shape.heads * shape.head_dim);
    require_size("rope: positions", positions.size(), shape.rows);
    if (shape.dim % 2 != 0 || shape.offset + shape.dim > shape.head_dim)
        throw std::invalid_argument("rope: the rotated columns do not fit into the head");
    if (!shape.frequencies.empty())
        require_size("rope: frequencies", shape.frequencies.size(), shape.dim / 2);
    Vector out(x.begin(), x.end());
    for (std::size_t r = 0; r < shape.rows; ++r) {
        for (std::size_t i = 0; i < shape.dim / 2; ++i) {
            const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(shape.dim);
            const double frequency =
                shape.frequencies.empty() ? std::pow(shape.theta, exponent) : shape.frequencies[i];
            const double angle = static_cast<double>(positions[r]) * frequency;
            const double cosine = shape.amplitude * std::cos(angle);
            const double sine = shape.amplitude * (inverse ? -std::sin(angle) : std::sin(angle));
            for (std::size_t h = 0; h < shape.heads; ++h) {
                const std::size_t at =
                    (r * shape.heads + h) * shape.head_dim + shape.offset + 2 * i;
                out[at] = x[at] * cosine - x[at + 1] * sine;
                out[at + 1] = x[at] * sine + x[at + 1] * cosine;
            }
        }
    }
    return out;
}

namespace {

double silu(double x) {
    return x / (1 + std::exp(-x));
}

double silu_derivative(double x) {
    const double sigmoid = 1 / (1 + std::exp(-x));
    return sigmoid * (1 + x * (1 - sigmoid));
}

} // namespace

Vector swiglu_forward(View x, View weight, std::size_t rows, std::size_t ffn) {
    require_size("swiglu: x", x.size(), rows * 2 * ffn);
    require_size("swiglu: weight", weight.size(), weight.empty() ? 0 : rows);
    Vector y(rows * ffn);
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < ffn; ++c)
            y[r * ffn + c] = silu(x[r * 2 * ffn + c]) * x[r * 2 * ffn + ffn + c] *
                             (weight.empty() ? 1 : weight[r]);
    return y;
}

SwigluGrads swiglu_input_grad(View dy, View x, View weight, std::size_t rows, std::size_t ffn) {
    require_size("swiglu: dy", dy.size(), rows * ffn);
    require_size("swiglu: x", x.size(), rows * 2 * ffn);
    SwigluGrads grads{Vector(x.size()), Vector(rows, 0.0)};
    for (std::size_t r = 0; r < rows; ++r) {
        const double w = weight.empty() ? 1 : weight[r];
        for (std::size_t c = 0; c < ffn; ++c) {
            const std::size_t gate_at = r * 2 * ffn + c, up_at = gate_at + ffn;
            const double d = dy[r * ffn + c], gate = x[gate_at], up = x[up_at];
            grads.dx[gate_at] = d * w * up * silu_derivative(gate);
            grads.dx[up_at] = d * w * silu(gate);
            grads.dweight[r] += d * silu(gate) * up;
        }
    }
    return grads;
}

Vector embedding_forward(View table, std::span<const std::int32_t> tokens, std::size_t hidden) {
    Vector out;
    out.reserve(tokens.size() * hidden);
    for (const std::int32_t token : tokens) {
        const auto row = table.subspan(static_cast<std::size_t>(token) * hidden, hidden);
        out.insert(out.end(), row.begin(), row.end());
    }
    return out;
}

Vector embedding_weight_grad(View dy, std::span<const std::int32_t> tokens, std::size_t vocabulary,
                             std::size_t hidden) {
    require_size("embedding: dy", dy.size(), tokens.size() * hidden);
    Vector dtable(vocabulary * hidden, 0.0);
    for (std::size_t t = 0; t < tokens.size(); ++t)
        for (std::size_t c = 0; c < hidden; ++c)
            dtable.at(static_cast<std::size_t>(tokens[t]) * hidden + c) += dy[t * hidden + c];
    return dtable;
}

CrossEntropy cross_entropy(View logits, std::span<const std::int32_t> targets,
                           std::size_t vocabulary, double scale) {
    const std::size_t rows = targets.size();
    require_size("cross_entropy: logits", logits.size(), rows * vocabulary);
    CrossEntropy out{Vector(rows, 0.0), 0, 0, Vector(logits.size(), 0.0)};
    for (std::size_t r = 0; r < rows; ++r) {
        if (targets[r] == -1)
            continue;
        if (targets[r] < 0 || static_cast<std::size_t>(targets[r]) >= vocabulary)
            throw std::invalid_argument("cross_entropy: a target is not in the vocabulary");
        const View row = logits.subspan(r * vocabulary, vocabulary);
        double largest = row[0];
        for (const double value : row)
            largest = std::max(largest, value);
        double sum = 0;
        for (const double value : row)
            sum += std::exp(value - largest);
        const auto target = static_cast<std::size_t>(targets[r]);
        out.losses[r] = std::log(sum) + largest - row[target];
        out.sum += out.losses[r];
        ++out.count;
        for (std::size_t c = 0; c < vocabulary; ++c)
            out.dlogits[r * vocabulary + c] = scale * std::exp(row[c] - largest) / sum;
        out.dlogits[r * vocabulary + target] -= scale;
    }
    return out;
}

} // namespace bellows::reference
