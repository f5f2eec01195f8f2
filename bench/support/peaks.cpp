// SPDX-License-Identifier: MIT
#include "support/peaks.hpp"

#include <bellows/engine/error.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace bellows::bench {

namespace {

/// Seconds of the fastest of many runs, 0.4 s of them in all, after one that compiles.
double best_seconds(Device& device, Recording& recording) {
    device.submit(recording).wait();
    double best = 1e30, total = 0;
    for (int run = 0; run < 10 || total < 0.4; ++run) {
        const auto begin = std::chrono::steady_clock::now();
        device.submit(recording).wait();
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        total += seconds;
        best = std::min(best, seconds);
    }
    return best;
}

void expect_all(Device& device, const Buffer& sums, std::uint64_t count, float expected) {
    std::vector<float> values(count);
    device.download(sums.view(), std::span<float>(values));
    for (const float value : values)
        if (value != expected)
            throw Error(ErrorCode::Internal, "a register-only loop gives " + std::to_string(value) +
                                                 " instead of " + std::to_string(expected));
}

} // namespace

double fma_peak(Device& device) {
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
    Recording recording(device, QueueRole::Compute, "peak");
    recording.dispatch(kernel, {groups});
    const double best = best_seconds(device, recording);
    expect_all(device, sums, invocations, 16.0f);
    return 16.0 * steps * static_cast<double>(invocations) / best * 1e-9;
}

double matrix_peak(Device& device) {
    const GemmClass& c = gemm_class(device);
    if (c.units == GemmClass::Units::None)
        return 0;
    const bool cpu = device.info().is_cpu;
    const std::uint32_t groups = cpu ? 64 : 2048, steps = cpu ? 2000 : 4096,
                        subgroups = cpu ? 1 : 8;
    kernels::PeakCoopmat kernel;
    kernel.variant = c.units == GemmClass::Units::BF16 ? kernels::PeakCoopmat::Variant::bf16
                                                       : kernels::PeakCoopmat::Variant::f16;
    kernel.constants = {device.info().subgroup_size * subgroups, c.shape.m, c.shape.n, c.shape.k};
    const std::uint64_t count = std::uint64_t{groups} * subgroups * c.shape.m * c.shape.n;
    const Buffer sums(device, {.name = "sums", .bytes = count * 4});
    kernel.sums = sums.view();
    kernel.steps = steps;
    kernel.factor = 1.0f;
    Recording recording(device, QueueRole::Compute, "peak");
    recording.dispatch(kernel, {groups});
    const double best = best_seconds(device, recording);
    expect_all(device, sums, count, 8.0f * static_cast<float>(steps * c.shape.k) + 28.0f);
    return 2.0 * 8 * steps * static_cast<double>(count) * c.shape.k / best * 1e-9;
}

} // namespace bellows::bench
