// SPDX-License-Identifier: MIT
#pragma once

// Benchmarks of recorded work: check the result once, run until the clocks are up, then time a
// recording that repeats it often enough to hide the submission. The time is the median of the
// host's around submit and wait, per repetition, beside the least and the most.

#include "support/peaks.hpp"
#include "support/program.hpp"
#include "support/spread.hpp"
#include "verify/reference/compare.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/ops.hpp>

#include <benchmark/benchmark.h>

#include <cmath>
#include <deque>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

namespace bellows::bench {

/// Owns the tensors of one benchmark.
class OpData {
public:
    explicit OpData(Device& device) : device_(device) {}

    Device& device() const { return device_; }
    BufferView bytes(std::uint64_t size);
    TensorView empty(DType dtype, std::initializer_list<std::uint64_t> extents);
    /// Uniform values of [low, high], reproducible.
    TensorView random(DType dtype, std::initializer_list<std::uint64_t> extents, float low = -1,
                      float high = 1);
    /// Uniform numbers below `below`, i32 or u32.
    TensorView indices(DType dtype, std::initializer_list<std::uint64_t> extents,
                       std::uint64_t below);
    TensorView values(std::initializer_list<std::uint64_t> extents, const std::vector<float>& from);

    /// A contiguous tensor's elements.
    std::vector<double> read(const TensorView& view) const;

private:
    void upload(const TensorView& view, const std::vector<std::uint32_t>& words);
    Device& device_;
    std::deque<Buffer> buffers_;
    reference::Random random_{1};
};

struct Workload {
    std::function<void(Recording&)> record;
    std::function<std::string()> verify; ///< "" or what is wrong
    double bytes = 0;                    ///< each byte of each tensor once
    double flops = 0;
};

/// "" when |actual - expected| <= tolerance * (|expected| + scale), else what and where.
std::string compare(const char* what, std::uint64_t at, double actual, double expected,
                    double tolerance, double scale = 1);

/// What f32 arithmetic and one rounding to the storage leave, relative.
inline double tolerance(DType dtype) {
    return dtype == DType::BF16 ? 8e-3 : 1e-4;
}

/// Of all elements of the tensors.
inline double bytes_of(std::initializer_list<TensorView> views) {
    double bytes = 0;
    for (const TensorView& view : views)
        bytes += static_cast<double>(view.num_bytes());
    return bytes;
}

/// First, middle and last of `count`.
inline std::vector<std::uint64_t> samples(std::uint64_t count) {
    return {0, count / 2, count - 1};
}

/// Seconds of what `record` records, as the head of this file says; times for `least` seconds and
/// at least least_repeats() times.
Spread time_recorded(Device& device, const std::function<void(Recording&)>& record,
                     double least = least_seconds());

/// Checks, then times for least_seconds() and sets the rates, with the share of the ceiling if it
/// has a rate. A wrong result fails the benchmark.
void run_workload(benchmark::State& state, OpData& data, const Workload& workload,
                  const Ceiling& ceiling = {});

} // namespace bellows::bench
