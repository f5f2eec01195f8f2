// SPDX-License-Identifier: MIT
#pragma once

// Benchmarks of recorded work: check the result once, run until the clocks are up, then time a
// recording that repeats it often enough to hide the submission. The time is the median of the
// host's around submit and wait, per repetition.

#include "reference/compare.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/ops.hpp>

#include <benchmark/benchmark.h>

#include <cmath>
#include <deque>
#include <functional>
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
    double bytes = 0;                    ///< read and written, each tensor once
    double flops = 0;
};

/// "" when |actual - expected| <= tolerance * (|expected| + scale), else what and where.
std::string compare(const char* what, std::uint64_t at, double actual, double expected,
                    double tolerance, double scale = 1);

void run_workload(benchmark::State& state, OpData& data, const Workload& workload);

} // namespace bellows::bench
