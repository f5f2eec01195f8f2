// SPDX-License-Identifier: MIT
#include "gemm/product.hpp"

#include <algorithm>
#include <cmath>
#include <span>

namespace bellows::bench {

namespace {

std::uint64_t next(std::uint64_t& state) {
    return state = state * 6364136223846793005u + 1442695040888963407u;
}

} // namespace

std::string name_of(const Shape& s) {
    return (s.groups == 0 ? "" : std::to_string(s.groups) + "x") + std::to_string(s.m) + "x" +
           std::to_string(s.n) + "x" + std::to_string(s.k);
}

const char* name_of(GemmForm form) {
    static constexpr const char* kNames[] = {"nt", "nn", "tn"};
    return kNames[static_cast<int>(form)];
}

Product::Product(Device& device, const Shape& s, GemmForm f, DType t)
    : shape(s), form(f), dtype(t), data_(device) {
    const bool tn = form == GemmForm::TN, nt = form == GemmForm::NT;
    if (s.groups == 0) {
        a_ = tn ? data_.random(t, {s.k, s.m}) : data_.random(t, {s.m, s.k});
        b_ = nt ? data_.random(t, {s.n, s.k}) : data_.random(t, {s.k, s.n});
        d_ = data_.empty(t, {s.m, s.n});
    } else {
        make_groups();
        const std::uint64_t rows = begins_.back();
        a_ = tn ? data_.random(t, {rows, s.n}) : data_.random(t, {rows, s.k});
        b_ = tn   ? data_.random(t, {rows, s.k})
             : nt ? data_.random(t, {s.groups, s.n, s.k})
                  : data_.random(t, {s.groups, s.k, s.n});
        // A weight's gradient is summed in f32.
        d_ = tn ? data_.empty(DType::F32, {s.groups, s.n, s.k}) : data_.empty(t, {rows, s.n});
    }
    a_values_ = data_.read(a_);
    b_values_ = data_.read(b_);
}

/// 0.7 to 1.3 times the mean, as routers give them.
void Product::make_groups() {
    begins_ = {0};
    std::uint64_t state = 1;
    for (std::uint64_t g = 0; g < shape.groups; ++g) {
        const double factor = 0.7 + 0.6 * static_cast<double>(next(state) >> 40) * 0x1p-24;
        begins_.push_back(begins_.back() +
                          static_cast<std::uint64_t>(static_cast<double>(shape.m) * factor));
    }
    offsets_ = data_.empty(DType::U32, {shape.groups + 1});
    const std::vector<std::uint32_t> values(begins_.begin(), begins_.end());
    data_.device().upload(offsets_.buffer.sub(0, values.size() * 4),
                          std::span<const std::uint32_t>(values));
}

std::string Product::check_samples() const {
    const std::vector<double> d = data_.read(d_);
    const Shape& s = shape;
    const bool tn = form == GemmForm::TN, nt = form == GemmForm::NT;
    const double tolerance = d_.dtype == DType::BF16 ? 8e-3 : 1e-4;
    std::uint64_t state = 7;
    for (int sample = 0; sample < 100; ++sample) {
        const std::uint64_t any = (next(state) >> 16) % d.size();
        const std::uint64_t at = sample == 0 ? 0 : sample == 1 ? d.size() - 1 : any;
        double sum = 0, squares = 0; // of a sum of many terms that may come out small
        const auto add = [&](double term) {
            sum += term;
            squares += term * term;
        };
        if (s.groups != 0 && tn) { // D[g][i][j] = sum over rows of A[r][i] B[r][j]
            const std::uint64_t g = at / (s.n * s.k), i = at / s.k % s.n, j = at % s.k;
            for (std::uint64_t r = begins_[g]; r < begins_[g + 1]; ++r)
                add(a_values_[r * s.n + i] * b_values_[r * s.k + j]);
        } else {
            const std::uint64_t i = at / s.n, j = at % s.n;
            const auto after = std::upper_bound(begins_.begin(), begins_.end(), i);
            const auto group = static_cast<std::uint64_t>(after - begins_.begin());
            const std::uint64_t base = s.groups == 0 ? 0 : (group - 1) * s.n * s.k;
            for (std::uint64_t l = 0; l < s.k; ++l)
                add(a_values_[tn ? l * s.m + i : i * s.k + l] *
                    b_values_[base + (nt ? j * s.k + l : l * s.n + j)]);
        }
        const std::string wrong =
            compare("d", at, d[at], sum, tolerance, std::max(1.0, std::sqrt(squares)));
        if (!wrong.empty())
            return wrong;
    }
    return "";
}

void Product::record(Recording& recording, BufferView list) const {
    if (shape.groups == 0) {
        const auto op = form == GemmForm::NT   ? ops::gemm_nt
                        : form == GemmForm::NN ? ops::gemm_nn
                                               : ops::gemm_tn;
        op(recording, a_, b_, d_, false, 1.0f);
    } else if (form == GemmForm::TN) {
        ops::grouped_gemm_tn(recording, a_, b_, d_, offsets_);
    } else {
        const auto tiles =
            ops::make_group_tiles(recording, offsets_, begins_.back(), {shape.n, 0, 0, 0}, list);
        const auto op = form == GemmForm::NT ? ops::grouped_gemm_nt : ops::grouped_gemm_nn;
        op(recording, a_, b_, d_, tiles, false, 1.0f);
    }
}

Workload Product::workload() {
    const std::uint64_t rows = shape.groups == 0 ? shape.m : begins_.back();
    const BufferView list =
        shape.groups == 0 ? BufferView{}
                          : data_.bytes(ops::group_tiles_bytes(data_.device(), rows, shape.groups));
    return {[this, list](Recording& recording) { record(recording, list); },
            [this] { return check_samples(); },
            static_cast<double>(a_.num_bytes() + b_.num_bytes() + d_.num_bytes()),
            2 * static_cast<double>(rows) * static_cast<double>(shape.n) *
                static_cast<double>(shape.k)};
}

} // namespace bellows::bench
