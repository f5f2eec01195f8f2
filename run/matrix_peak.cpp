// SPDX-License-Identifier: MIT
#include <bellows/run/matrix_peak.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/mix.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

namespace {

constexpr double kLeastRun = 5e-3; ///< seconds: what a submission takes does not count beside it
constexpr double kSecondsOfRuns = 0.15; ///< in which the clock of an idle GPU rises

double seconds_of(Device& device, Recording& recording) {
    const auto begin = std::chrono::steady_clock::now();
    device.submit(recording).wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double fastest_run(Device& device, Recording& recording) {
    double best = seconds_of(device, recording), total = best;
    while (total < kSecondsOfRuns) {
        const double seconds = seconds_of(device, recording);
        best = std::min(best, seconds);
        total += seconds;
    }
    return best;
}

/// Operations per second of a loop that record(recording, steps) records. More steps until a run is
/// long enough.
double rate_of_loop(Device& device, double flops_of_step,
                    const std::function<void(Recording&, std::uint32_t steps)>& record) {
    constexpr std::uint32_t kMostSteps = 1 << 14;
    for (std::uint32_t steps = 64;; steps *= 4) {
        Recording loop(device, QueueRole::Compute, "peak");
        record(loop, steps);
        if (std::min(seconds_of(device, loop), seconds_of(device, loop)) >= kLeastRun ||
            steps >= kMostSteps)
            return flops_of_step * steps / fastest_run(device, loop);
    }
}

constexpr double kOfChains = 16; ///< both kernels have 8 chains, of multiplications and additions

MatrixPeak fma_peak(Device& device) {
    constexpr std::uint32_t kGroups = 8192;
    kernels::PeakFma kernel;
    kernel.constants.local_size = 256;
    const std::uint64_t invocations = std::uint64_t{kGroups} * kernel.constants.local_size;
    const Buffer sums(device, {.name = "peak", .bytes = invocations * 4});
    kernel.sums = sums.view();
    kernel.factor = 0.5f;
    kernel.addend = 1.0f;
    return {rate_of_loop(device, kOfChains * static_cast<double>(invocations),
                         [&](Recording& loop, std::uint32_t steps) {
                             kernel.steps = steps;
                             loop.dispatch(kernel, {kGroups});
                         }),
            "f32 multiply-additions on registers"};
}

/// Nothing where no kernel of this build runs on the units.
std::optional<MatrixPeak> units_peak(Device& device) {
    constexpr std::uint32_t kGroups = 2048, kSubgroups = 8;
    const GemmClass& gemm = gemm_class(device);
    kernels::PeakCoopmat kernel;
    kernel.variant = gemm.units == GemmClass::Units::F16 ? kernels::PeakCoopmat::Variant::f16
                                                         : kernels::PeakCoopmat::Variant::bf16;
    if (gemm.units == GemmClass::Units::None ||
        !device.why_not(kernels::PeakCoopmat::info(), static_cast<std::uint32_t>(kernel.variant))
             .empty())
        return std::nullopt;
    const MatrixShape& shape = gemm.shape;
    kernel.constants = {device.info().subgroup_size * kSubgroups, shape.m, shape.n, shape.k};
    const std::uint64_t elements = std::uint64_t{kGroups} * kSubgroups * shape.m * shape.n;
    const Buffer sums(device, {.name = "peak", .bytes = elements * 4});
    kernel.sums = sums.view();
    kernel.factor = 1.0f;
    return MatrixPeak{rate_of_loop(device, kOfChains * static_cast<double>(elements) * shape.k,
                                   [&](Recording& loop, std::uint32_t steps) {
                                       kernel.steps = steps;
                                       loop.dispatch(kernel, {kGroups});
                                   }),
                      "products of its matrix units on registers"};
}

/// Values of random signs and fractions, as units take more power for those than for zeros, and the
/// clock follows the power.
void fill_with_values(Device& device, BufferView operand) {
    constexpr std::uint64_t kBytes = std::uint64_t{1} << 20;
    std::vector<std::uint32_t> words(kBytes / 4);
    for (std::uint64_t i = 0; i < words.size(); ++i) {
        constexpr std::uint32_t kSignAndFraction = 0x807f807f, kQuarter = 0x3e803e80;
        words[i] = (static_cast<std::uint32_t>(mix(i)) & kSignAndFraction) | kQuarter;
    }
    const Buffer some(device, {.name = "peak", .bytes = kBytes});
    device.upload(some.view(), std::span<const std::uint32_t>(words));
    Recording copies(device, QueueRole::Compute, "peak");
    for (std::uint64_t at = 0; at < operand.bytes; at += kBytes)
        copies.copy(some.view(), operand.sub(at, kBytes));
    device.submit(copies).wait();
}

/// Of M = N = 4096 and K = 8192, as often as makes a run long enough.
MatrixPeak product_peak(Device& device) {
    constexpr std::uint64_t kSide = 4096, kDepth = 8192;
    const Buffer a(device, {.name = "peak", .bytes = kSide * kDepth * 2}),
        b(device, {.name = "peak", .bytes = kSide * kDepth * 2}),
        d(device, {.name = "peak", .bytes = kSide * kSide * 2});
    fill_with_values(device, a.view());
    fill_with_values(device, b.view());
    const double rate = rate_of_loop(
        device, 2.0 * kSide * kSide * kDepth / 64, [&](Recording& loop, std::uint32_t steps) {
            for (std::uint32_t i = 0; i < steps / 64; ++i)
                ops::gemm_nt(loop, a.tensor(DType::BF16, {kSide, kDepth}),
                             b.tensor(DType::BF16, {kSide, kDepth}),
                             d.tensor(DType::BF16, {kSide, kSide}));
        });
    return {rate, "a bf16 product of 4096x4096x8192, " + gemm_class(device).name};
}

} // namespace

MatrixPeak measure_matrix_peak(Device& device) {
    if (device.info().is_cpu)
        return {};
    const std::optional<MatrixPeak> units = units_peak(device);
    const MatrixPeak registers = units ? *units : fma_peak(device);
    try {
        const MatrixPeak product = product_peak(device);
        return product.flops_per_s > registers.flops_per_s ? product : registers;
    } catch (const Error& error) {
        if (error.code() != ErrorCode::OutOfMemory)
            throw;
        return registers;
    }
}

} // namespace bellows
