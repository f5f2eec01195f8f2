// SPDX-License-Identifier: MIT
#include "ops/workloads.hpp"

#include <bellows/fp8/few_rows.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>
#include <memory>

namespace bellows::bench {

namespace {

/// Matrices of the same values that are read in turn, so that none of them waits in a cache.
class WeightSet {
public:
    WeightSet(OpData& data, std::uint64_t matrices, std::uint64_t n, std::uint64_t k) {
        const fp8::Recipe recipe{fp8::Blocks::Blocks128, fp8::Format::E4M3,
                                 fp8::ScaleRule::PowerOfTwo};
        codes_ = fp8::make_quantized(data.bytes(fp8::quantized_bytes(recipe, {matrices, n, k})),
                                     recipe, {matrices, n, k});
        const TensorView values = data.random(DType::BF16, {n, k});
        values_ = data.empty(DType::F32, {n, k});
        Recording recording(data.device(), QueueRole::Compute, "prepare");
        for (std::uint64_t i = 0; i < matrices; ++i)
            fp8::quantize(recording, values, matrix(i));
        fp8::dequantize(recording, matrix(0), values_);
        data.device().submit(recording).wait();
    }

    const fp8::Quantized& all() const { return codes_; }
    fp8::Quantized matrix(std::uint64_t i) const {
        fp8::Quantized one = codes_;
        one.codes = without_batch(codes_.codes, i);
        one.scales = without_batch(codes_.scales, i);
        return one;
    }
    std::vector<double> values(const OpData& data) const { return data.read(values_); }
    double bytes() const {
        return bytes_of({codes_.codes, codes_.scales}) /
               static_cast<double>(codes_.codes.extent[0]);
    }

private:
    static TensorView without_batch(const TensorView& view, std::uint64_t i) {
        const std::uint64_t at = i * view.stride[0] * size_of(view.dtype),
                            bytes = view.extent[1] * view.stride[1] * size_of(view.dtype);
        TensorView one = TensorView::contiguous(view.buffer.sub(at, bytes), view.dtype,
                                                {view.extent[1], view.extent[2]});
        one.stride[0] = view.stride[1];
        return one;
    }

    fp8::Quantized codes_;
    TensorView values_;
};

double dot(const std::vector<double>& x, std::uint64_t x_at, const std::vector<double>& w,
           std::uint64_t row, std::uint64_t k) {
    double sum = 0;
    for (std::uint64_t i = 0; i < k; ++i)
        sum += x[x_at + i] * w[row * k + i];
    return sum;
}

double silu(double x) {
    return x * sigmoid(x);
}

/// More than caches hold.
std::uint64_t in_turn(const OpData& data, double bytes) {
    const double cache = data.device().info().is_cpu ? 1 : 200e6;
    return std::max<std::uint64_t>(static_cast<std::uint64_t>(cache / bytes), 1);
}

} // namespace

Workload few_rows(OpData& data, const Sizes& s, DType act, int part) {
    const bool swiglu = part == 1;
    const std::uint64_t k = s.hidden, n = swiglu ? 2 * s.ffn : s.hidden;
    const auto weights =
        std::make_shared<WeightSet>(data, in_turn(data, static_cast<double>(n * k)), n, k);
    const TensorView x = data.random(act, {1, k}), gain = data.random(DType::F32, {k}, 0.5f, 1.5f),
                     y = data.empty(act, {1, swiglu ? s.ffn : n});
    const auto next = std::make_shared<std::uint64_t>(0);
    const auto record = [=](Recording& r) {
        fp8::FewRowsForm form{.gain = gain, .eps = 1e-6f};
        form.result = swiglu ? fp8::FewRowsForm::Result::Swiglu : fp8::FewRowsForm::Result::Store;
        fp8::few_rows_nt(r, x, weights->matrix((*next)++ % weights->all().codes.extent[0]), y,
                         form);
    };
    const auto verify = [=, &data]() -> std::string {
        auto xs = data.read(x);
        const auto g = data.read(gain), ys = data.read(y), w = weights->values(data);
        double squares = 0;
        for (const double value : xs)
            squares += value * value;
        for (std::uint64_t i = 0; i < k; ++i)
            xs[i] *= g[i] / std::sqrt(squares / static_cast<double>(k) + 1e-6);
        for (const std::uint64_t i : samples(ys.size())) {
            const double sum = dot(xs, 0, w, i, k);
            const double expected = swiglu ? silu(sum) * dot(xs, 0, w, i + s.ffn, k) : sum;
            if (const std::string wrong = compare("y", i, ys[i], expected, tolerance(act), 4);
                !wrong.empty())
                return wrong;
        }
        return "";
    };
    return {record, verify, weights->bytes() + bytes_of({x, gain, y}), 0};
}

Workload few_rows_experts(OpData& data, const Sizes& s, DType act, int part) {
    const bool down = part == 1;
    const std::uint64_t k = down ? s.ffn : s.hidden, n = down ? s.hidden : 2 * s.ffn;
    const auto weights = std::make_shared<WeightSet>(data, s.experts, n, k);
    const TensorView x = data.random(act, {down ? s.top_k : 1, k}),
                     y = data.random(act, {down ? 1 : s.top_k, down ? n : s.ffn}),
                     shares = data.random(DType::F32, {1, s.top_k}, 0, 1),
                     count = data.empty(DType::U32, {1});
    const std::uint32_t one = 1;
    data.device().upload(count.buffer.sub(0, 4), std::span<const std::uint32_t>(&one, 1));
    const auto choices = std::make_shared<std::vector<TensorView>>();
    for (std::uint64_t i = 0; i < 10; ++i) {
        std::vector<std::uint32_t> ids;
        for (std::uint64_t c = 0; c < s.top_k; ++c)
            ids.push_back(static_cast<std::uint32_t>((i * s.top_k + c) % s.experts));
        const TensorView view = data.empty(DType::I32, {1, s.top_k});
        data.device().upload(view.buffer.sub(0, 4 * s.top_k), std::span<const std::uint32_t>(ids));
        choices->push_back(view.with_row_count(count.buffer.sub(0, 4)));
    }
    const auto before = data.read(y);
    const auto next = std::make_shared<std::uint64_t>(0);
    const auto record = [=](Recording& r) {
        const TensorView& ids = (*choices)[(*next)++ % choices->size()];
        if (down)
            fp8::few_rows_experts(
                r, {.hidden = x, .weights = weights->all(), .ids = ids, .choice_weights = shares},
                y);
        else
            fp8::few_rows_by_ids(r, x, weights->all(), ids, y,
                                 {.result = fp8::FewRowsForm::Result::Swiglu});
    };
    const auto verify = [=, &data]() -> std::string {
        const auto xs = data.read(x), ys = data.read(y), w = weights->values(data),
                   share = data.read(shares);
        for (const std::uint64_t i : samples(down ? n : s.ffn)) {
            double expected =
                down ? before[i] : silu(dot(xs, 0, w, i, k)) * dot(xs, 0, w, i + s.ffn, k);
            for (std::uint64_t c = 0; down && c < s.top_k; ++c)
                expected += share[c] * dot(xs, c * k, w, i, k);
            if (const std::string wrong = compare("y", i, ys[i], expected, tolerance(act), 4);
                !wrong.empty())
                return wrong;
        }
        return "";
    };
    return {record, verify, static_cast<double>(s.top_k) * weights->bytes() + bytes_of({x, y}), 0};
}

} // namespace bellows::bench
