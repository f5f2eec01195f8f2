// SPDX-License-Identifier: MIT
#include "moe_layer/layer.hpp"

#include "verify/reference/fp8.hpp"

#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <thread>

namespace bellows::bench {

namespace {

using Values = std::vector<double>;

/// Products that are checked take so many multiplications at most: some seconds of two cores.
constexpr double kMultiplications = 6.6e9;
constexpr double kBf16 = 1.01 * reference::kBf16Epsilon;

double as_double(std::uint64_t count) {
    return static_cast<double>(count);
}

/// compare() with a bound of its own beside that of bf16's rounding.
std::string compare_bf16(const std::string& what, std::uint64_t at, double actual, double expected,
                         double bound) {
    return compare(what.c_str(), at, actual, expected, kBf16, bound / kBf16);
}

double dot(const double* a, const double* b, std::uint64_t count) {
    std::array<double, 8> sums{};
    std::uint64_t i = 0;
    for (; i + sums.size() <= count; i += sums.size())
        for (std::size_t lane = 0; lane < sums.size(); ++lane)
            sums[lane] += a[i + lane] * b[i + lane];
    for (; i < count; ++i)
        sums[0] += a[i] * b[i];
    double sum = 0;
    for (const double part : sums)
        sum += part;
    return sum;
}

/// One matrix of an operand on the host, or one row of it.
class HostMatrix {
public:
    /// Rows [first, first + rows) of matrix `batch`.
    HostMatrix(Device& device, const fp8::Operand& operand, std::uint64_t batch,
               std::uint64_t first, std::uint64_t rows)
        : first_(first), columns_(operand.values.extent[operand.values.rank - 1]),
          values_(device, operand.values, batch, first, rows) {
        if (!operand.quantized)
            return;
        recipe_ = operand.quantized->recipe;
        block_rows_ = recipe_->blocks == fp8::Blocks::Blocks128 ? 128 : 1;
        const std::uint64_t first_block = first / block_rows_;
        scales_.emplace(device, operand.quantized->scales, batch, first_block,
                        div_up(first + rows, block_rows_) - first_block);
        for (std::uint32_t code = 0; code < codes_.size(); ++code)
            codes_[code] =
                reference::fp8_value(reference::Fp8Format::E4M3, static_cast<std::uint8_t>(code));
    }

    Values row(std::uint64_t row) const {
        Values values(columns_);
        const std::byte* const from = values_.row(row - first_);
        for (std::uint64_t i = 0; i < columns_; ++i)
            values[i] = recipe_ ? codes_[static_cast<std::uint8_t>(from[i])] * scale(row, i)
                                : reference::from_bf16(read<std::uint16_t>(from, i));
        return values;
    }
    double scale(std::uint64_t row, std::uint64_t column) const {
        return read<float>(scales_->row(row / block_rows_ - first_ / block_rows_), column / 128);
    }

private:
    /// Rows of a strided tensor.
    struct Rows {
        Rows(Device& device, const TensorView& view, std::uint64_t batch, std::uint64_t first,
             std::uint64_t rows)
            : stride(view.stride[view.rank - 2] * size_of(view.dtype)), bytes(rows * stride) {
            const std::uint64_t at =
                (view.rank == 3 ? batch * view.stride[0] * size_of(view.dtype) : 0) +
                first * stride;
            device.download(view.buffer.sub(at, bytes.size()), bytes);
        }
        const std::byte* row(std::uint64_t at) const { return bytes.data() + at * stride; }

        std::uint64_t stride;
        std::vector<std::byte> bytes;
    };
    template <class T>
    static T read(const std::byte* from, std::uint64_t at) {
        T value;
        std::memcpy(&value, from + at * sizeof(T), sizeof(T));
        return value;
    }

    std::uint64_t first_, columns_, block_rows_ = 1;
    Rows values_;
    std::optional<Rows> scales_;
    std::optional<fp8::Recipe> recipe_;
    std::array<double, 256> codes_{};
};

Values row_of(Device& device, const fp8::Operand& operand, std::uint64_t row) {
    return HostMatrix(device, operand, 0, row, 1).row(row);
}

/// A row of A, the expert whose matrix it is multiplied by, and what came out.
struct ProductRow {
    std::string name;
    std::uint64_t expert = 0;
    Values a, d;
};

/// One row of an expert's matrix by all rows of that expert.
std::string check_column(std::span<const ProductRow* const> rows, const Values& weights,
                         std::uint64_t column) {
    const std::uint64_t k = weights.size();
    const double size = std::sqrt(dot(weights.data(), weights.data(), k));
    for (const ProductRow* row : rows) {
        // The roundings of an f32 sum add up as in a random walk.
        const double bound = 16 * std::sqrt(as_double(k)) * reference::kF32Epsilon * size *
                             std::sqrt(dot(row->a.data(), row->a.data(), k));
        const double expected = dot(row->a.data(), weights.data(), k);
        if (std::string wrong = compare_bf16(row->name, column, row->d[column], expected, bound);
            !wrong.empty())
            return wrong;
    }
    return "";
}

std::string check_product(Device& device, const fp8::Operand& weights,
                          const std::vector<ProductRow>& rows) {
    std::map<std::uint64_t, std::vector<const ProductRow*>> of_expert;
    for (const ProductRow& row : rows)
        of_expert[row.expert].push_back(&row);
    const std::uint64_t columns = weights.values.extent[1];
    const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
    std::mutex mutex;
    std::string wrong;
    for (const auto& [expert, its_rows] : of_expert) {
        const HostMatrix matrix(device, weights, expert, 0, columns);
        std::atomic<std::uint64_t> next = 0;
        std::vector<std::jthread> workers;
        for (unsigned worker = 0; worker < threads; ++worker)
            workers.emplace_back([&, &its = its_rows] {
                for (std::uint64_t n = next++; n < columns; n = next++)
                    if (std::string text = check_column(its, matrix.row(n), n); !text.empty()) {
                        const std::lock_guard lock(mutex);
                        wrong = std::move(text);
                        next = columns;
                    }
            });
        workers.clear();
        if (!wrong.empty())
            return wrong;
    }
    return "";
}

class Check {
public:
    Check(Device& device, const MoeLayerCase& c, const MoeLayerRouting& routing,
          const MoeLayerTensors& tensors)
        : device_(device), shape_(c.shape), routing_(routing), t_(tensors) {}

    std::string all() {
        if (std::string wrong = placement(); !wrong.empty())
            return wrong;
        std::vector<ProductRow> first, second;
        for (const std::uint64_t token : sampled_tokens()) {
            const Values x = row_of(device_, t_.x, token);
            if (std::string wrong = entering(token, x); !wrong.empty())
                return wrong;
            for (std::uint64_t k = 0; k < shape_.top_k; ++k)
                if (std::string wrong = expert(token, token * shape_.top_k + k, first, second);
                    !wrong.empty())
                    return wrong;
            if (std::string wrong = sum(token, second); !wrong.empty())
                return wrong;
        }
        if (std::string wrong = check_product(device_, t_.gate_up_weights, first); !wrong.empty())
            return wrong;
        return check_product(device_, t_.down_weights, second);
    }

private:
    template <class T>
    std::vector<T> words(const TensorView& view) const {
        std::vector<T> values(view.num_elements());
        device_.download(view.buffer.sub(0, values.size() * sizeof(T)), std::span(values));
        return values;
    }

    /// First, middle and last, and others.
    std::vector<std::uint64_t> sampled_tokens() const {
        const double each =
            3 * as_double(shape_.top_k) * as_double(shape_.hidden) * as_double(shape_.ffn);
        const auto most = static_cast<std::uint64_t>(std::max(1.0, kMultiplications / each));
        std::vector<std::uint64_t> tokens;
        if (most >= shape_.tokens) {
            for (std::uint64_t t = 0; t < shape_.tokens; ++t)
                tokens.push_back(t);
            return tokens;
        }
        tokens = samples(shape_.tokens);
        reference::Random random(7);
        while (tokens.size() < most)
            tokens.push_back(random.below(shape_.tokens));
        return tokens;
    }

    /// Checks where the rows of all slots stand.
    std::string placement() {
        row_of_slot_ = words<std::int32_t>(t_.layout.slot_to_row);
        const auto slot_of_row = words<std::int32_t>(t_.layout.row_to_slot);
        const auto first = words<std::uint32_t>(t_.layout.offsets),
                   counts = words<std::uint32_t>(t_.layout.counts);
        for (std::uint64_t slot = 0; slot < row_of_slot_.size(); ++slot) {
            const auto e = static_cast<std::size_t>(routing_.ids[slot]);
            const std::int64_t row = row_of_slot_[slot];
            if (row < first[e] || row >= std::int64_t{first[e]} + counts[e] ||
                slot_of_row[static_cast<std::size_t>(row)] != static_cast<std::int64_t>(slot))
                return "slot " + std::to_string(slot) + " stands in row " + std::to_string(row);
        }
        return "";
    }

    /// Checks bit by bit what of a token enters the first product.
    std::string entering(std::uint64_t token, const Values& x) {
        const std::string name = "x of token " + std::to_string(token);
        if (t_.q) {
            const std::vector<float> values(x.begin(), x.end());
            std::vector<std::uint8_t> codes(values.size());
            entered_ = row_of(device_, *t_.q, token);
            for (std::uint64_t column = 0; column < shape_.hidden; column += 128) {
                const std::uint64_t end = std::min(column + 128, shape_.hidden);
                const double scale = reference::fp8_quantize_block(
                    values, shape_.hidden, {0, 1, column, end}, reference::Fp8Format::E4M3,
                    reference::Fp8Rule::PowerOfTwo, codes);
                for (std::uint64_t i = column; i < end; ++i)
                    if (std::string wrong = compare(
                            name.c_str(), i, entered_[i],
                            scale * reference::fp8_value(reference::Fp8Format::E4M3, codes[i]), 0);
                        !wrong.empty())
                        return wrong;
            }
            return "";
        }
        for (std::uint64_t k = 0; k < shape_.top_k; ++k) {
            entered_ = row_of(device_, t_.rows, place_of(token * shape_.top_k + k));
            for (std::uint64_t i = 0; i < shape_.hidden; ++i)
                if (std::string wrong = compare(name.c_str(), i, entered_[i], x[i], 0);
                    !wrong.empty())
                    return wrong;
        }
        return "";
    }

    std::string expert(std::uint64_t token, std::uint64_t slot, std::vector<ProductRow>& first,
                       std::vector<ProductRow>& second) {
        const std::string name =
            " of token " + std::to_string(token) + ", slot " + std::to_string(slot);
        const auto e = static_cast<std::uint64_t>(routing_.ids[slot]);
        const std::uint64_t row = place_of(slot);
        const HostMatrix hidden(device_, t_.hidden, 0, row, 1);
        first.push_back({"gate and up" + name, e, entered_, row_of(device_, t_.gate_up, row)});
        second.push_back({"result" + name, e, hidden.row(row), row_of(device_, t_.results, row)});
        return swiglu("swiglu" + name, first.back().d, hidden, row);
    }

    /// FP8: no further from the value than half the distance between codes, by the least power of
    /// two as scale.
    std::string swiglu(const std::string& name, const Values& gate_up, const HostMatrix& hidden,
                       std::uint64_t row) const {
        const Values actual = hidden.row(row);
        constexpr double kNearly = 1e-5; // arithmetic of f32
        for (std::uint64_t begin = 0; begin < shape_.ffn; begin += 128) {
            const std::uint64_t end = std::min(begin + 128, shape_.ffn);
            const double scale = t_.q ? hidden.scale(row, begin) : 0;
            double largest = 1e-4; // from which scales are taken
            for (std::uint64_t i = begin; i < end; ++i) {
                const double gate = gate_up[i], up = gate_up[shape_.ffn + i];
                const double expected = gate / (1 + std::exp(-gate)) * up;
                largest = std::max(largest, std::abs(expected));
                std::string wrong = t_.q ? compare(name.c_str(), i, actual[i], expected,
                                                   0x1p-4 + kNearly, scale * 0x1p-6)
                                         : compare_bf16(name, i, actual[i], expected, 1e-30);
                if (!wrong.empty())
                    return wrong;
            }
            const bool least =
                largest <= 448 * scale * (1 + kNearly) && largest > 224 * scale * (1 - kNearly);
            if (t_.q && !least)
                return name + "[" + std::to_string(begin) + "] has the scale " +
                       std::to_string(scale) + " for values up to " + std::to_string(largest);
        }
        return "";
    }

    /// Checks the sum of the token's results, which are the last ones.
    std::string sum(std::uint64_t token, const std::vector<ProductRow>& results) const {
        const Values y = row_of(device_, t_.y, token);
        for (std::uint64_t i = 0; i < shape_.hidden; ++i) {
            double expected = 0, size = 0;
            for (std::uint64_t k = 0; k < shape_.top_k; ++k) {
                const double term = double{routing_.weights[token * shape_.top_k + k]} *
                                    results[results.size() - shape_.top_k + k].d[i];
                expected += term;
                size += std::abs(term);
            }
            if (std::string wrong =
                    compare_bf16("y of token " + std::to_string(token), i, y[i], expected,
                                 2 * as_double(shape_.top_k) * reference::kF32Epsilon * size);
                !wrong.empty())
                return wrong;
        }
        return "";
    }

    std::uint64_t place_of(std::uint64_t slot) const {
        return static_cast<std::uint64_t>(row_of_slot_[slot]);
    }

    Device& device_;
    const MoeLayerShape shape_;
    const MoeLayerRouting& routing_;
    const MoeLayerTensors& t_;
    std::vector<std::int32_t> row_of_slot_;
    Values entered_; ///< of the last token
};

} // namespace

std::string check_moe_layer(Device& device, const MoeLayerCase& c, const MoeLayerRouting& routing,
                            const MoeLayerTensors& tensors) {
    return Check(device, c, routing, tensors).all();
}

} // namespace bellows::bench
