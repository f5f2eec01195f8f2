// SPDX-License-Identifier: MIT
// Hands two tensors to matmul() as any library would, and compares what comes back with the same
// product in plain C++.

#include "matmul.hpp"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

namespace {

constexpr std::int64_t kM = 48, kN = 32, kK = 64;

/// A matrix of host memory and the description that goes with it.
struct Matrix {
    std::vector<float> values;
    std::int64_t shape[2];
    DLManagedTensor managed{};

    Matrix(std::int64_t rows, std::int64_t columns, double step)
        : values(static_cast<std::size_t>(rows * columns)), shape{rows, columns} {
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] = static_cast<float>(std::sin(step * static_cast<double>(i)));
        managed.dl_tensor = {.data = values.data(),
                             .device = {kDLCPU, 0},
                             .ndim = 2,
                             .dtype = {kDLFloat, 32, 1},
                             .shape = shape,
                             .strides = nullptr,
                             .byte_offset = 0};
        managed.manager_ctx = this;
        managed.deleter = [](DLManagedTensor* gone) {
            delete static_cast<Matrix*>(gone->manager_ctx);
        };
    }
    double at(std::int64_t row, std::int64_t column) const {
        return values[static_cast<std::size_t>(row * shape[1] + column)];
    }
};

} // namespace

int main() {
    const Matrix a(kM, kK, 0.7), b(kN, kK, 0.3);
    DLManagedTensor* const d =
        matmul(&(new Matrix(kM, kK, 0.7))->managed, &(new Matrix(kN, kK, 0.3))->managed);
    if (d == nullptr) {
        std::fprintf(stderr, "dlpack: %s\n", matmul_error());
        return 3;
    }
    const auto* values = static_cast<const float*>(d->dl_tensor.data);
    double worst = 0;
    for (std::int64_t row = 0; row < kM; ++row)
        for (std::int64_t column = 0; column < kN; ++column) {
            double sum = 0;
            for (std::int64_t k = 0; k < kK; ++k)
                sum += a.at(row, k) * b.at(column, k);
            worst = std::fmax(worst, std::fabs(sum - values[row * kN + column]));
        }
    d->deleter(d);
    std::printf("[%lld, %lld] times the transpose of [%lld, %lld]: largest deviation %.1e\n",
                static_cast<long long>(kM), static_cast<long long>(kK), static_cast<long long>(kN),
                static_cast<long long>(kK), worst);
    return worst <= 1e-4 ? 0 : 1;
}
