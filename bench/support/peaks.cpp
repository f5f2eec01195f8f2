// SPDX-License-Identifier: MIT
#include "support/peaks.hpp"

#include "support/peak_loop.hpp"

#include <bellows/base/error.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <cstdio>

namespace bellows::bench {

namespace {

void expect_all(Device& device, const Buffer& sums, std::uint64_t count, float expected) {
    std::vector<float> values(count);
    device.download(sums.view(), std::span<float>(values));
    for (const float value : values)
        if (value != expected)
            throw Error(ErrorCode::Internal, "a register-only loop gives " + std::to_string(value) +
                                                 " instead of " + std::to_string(expected));
}

} // namespace

Ceiling fma_peak(Device& device) {
    const bool cpu = device.info().is_cpu;
    const std::uint32_t groups = cpu ? 64 : 8192, steps = cpu ? 20000 : 4096;
    kernels::PeakFma kernel;
    kernel.constants.local_size = cpu ? 8 : 256;
    const std::uint64_t invocations = std::uint64_t{groups} * kernel.constants.local_size;
    const Buffer sums(device, {.name = "sums", .bytes = invocations * 4});
    kernel.sums = sums.view();
    kernel.steps = steps;
    kernel.factor = 0.5f;
    kernel.addend = 1.0f; // every one of 8 chains tends to 2
    const double seconds = loop_seconds(device, kernel, groups);
    expect_all(device, sums, invocations, 16.0f);
    return {"fma",   "GFLOPS", 16e-9 * steps * static_cast<double>(invocations) / seconds,
            seconds, groups,   kernel.constants.local_size};
}

void raise_clock(Device& device) {
    if (!device.info().is_cpu)
        fma_peak(device);
}

std::string name_of(const MatrixRow& row) {
    return (row.units == GemmClass::Units::BF16 ? "bf16_f32_" : "f16_f32_") +
           std::to_string(row.shape.m) + "x" + std::to_string(row.shape.n) + "x" +
           std::to_string(row.shape.k);
}

namespace {

kernels::PeakCoopmat::Variant variant_of(GemmClass::Units units) {
    return units == GemmClass::Units::BF16 ? kernels::PeakCoopmat::Variant::bf16
                                           : kernels::PeakCoopmat::Variant::f16;
}

} // namespace

std::vector<MatrixRow> matrix_rows(const Device& device) {
    std::vector<MatrixRow> rows;
    for (const auto units : {GemmClass::Units::BF16, GemmClass::Units::F16}) {
        const auto variant = static_cast<std::uint32_t>(variant_of(units));
        if (!device.why_not(kernels::PeakCoopmat::info(), variant).empty())
            continue;
        for (const std::string& feature : device.info().features) {
            MatrixRow row{units, {0, 0, 0}};
            const std::size_t shape = feature.find_last_of('_') + 1;
            std::sscanf(feature.c_str() + shape, "%ux%ux%u", &row.shape.m, &row.shape.n,
                        &row.shape.k);
            if (feature == "coopmat_" + name_of(row))
                rows.push_back(row);
        }
    }
    return rows;
}

Ceiling matrix_peak(Device& device, const MatrixRow& row) {
    const bool cpu = device.info().is_cpu;
    const MatrixShape& shape = row.shape;
    const std::uint32_t groups = cpu ? 64 : 2048, steps = cpu ? 2000 : 4096,
                        subgroups = cpu ? 1 : 8;
    kernels::PeakCoopmat kernel;
    kernel.variant = variant_of(row.units);
    kernel.constants = {device.info().subgroup_size * subgroups, shape.m, shape.n, shape.k};
    const std::uint64_t count = std::uint64_t{groups} * subgroups * shape.m * shape.n;
    const Buffer sums(device, {.name = "sums", .bytes = count * 4});
    kernel.sums = sums.view();
    kernel.steps = steps;
    kernel.factor = 1.0f;
    const double seconds = loop_seconds(device, kernel, groups);
    expect_all(device, sums, count, 8.0f * static_cast<float>(steps * shape.k) + 28.0f);
    const double rate = 16e-9 * steps * static_cast<double>(count) * shape.k / seconds;
    return {"matrix", "GFLOPS", cpu ? 0 : rate, seconds, groups, kernel.constants.local_size};
}

Ceiling matrix_peak(Device& device) {
    const GemmClass& c = gemm_class(device);
    return c.units == GemmClass::Units::None ? Ceiling{"matrix", "GFLOPS"}
                                             : matrix_peak(device, {c.units, c.shape});
}

} // namespace bellows::bench
