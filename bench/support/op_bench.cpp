// SPDX-License-Identifier: MIT
#include "support/op_bench.hpp"

#include "support/program.hpp"
#include "verify/checks/op_rig.hpp"

#include <algorithm>
#include <bit>
#include <chrono>

namespace bellows::bench {

namespace {

double seconds_of(Device& device, Recording& recording) {
    const auto begin = std::chrono::steady_clock::now();
    device.submit(recording).wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// The least time of a run, of as many as take so many seconds together and then some until they
/// get no shorter. Clocks of a GPU that has waited for the host fall to a fifth and less.
double warm_up(Device& device, Recording& recording, double least) {
    constexpr double kMost = 3; // seconds
    double best = seconds_of(device, recording), last = best;
    const bool cpu = device.info().is_cpu;
    for (double total = best; !cpu && total < kMost && (total < least || last < 0.98 * best);
         total += last) {
        best = std::min(best, last);
        last = seconds_of(device, recording);
    }
    return std::min(best, last);
}

} // namespace

BufferView OpData::bytes(std::uint64_t size) {
    buffers_.emplace_back(device_, BufferDesc{.name = "bench", .bytes = (size + 15) / 16 * 16});
    return buffers_.back().view();
}

TensorView OpData::empty(DType dtype, std::initializer_list<std::uint64_t> extents) {
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : extents) {
        elements *= extent;
    }
    return TensorView::contiguous(bytes(elements * size_of(dtype)), dtype, extents);
}

void OpData::upload(const TensorView& view, const std::vector<std::uint32_t>& words) {
    device_.upload(BufferView{view.buffer.resource, view.buffer.offset, words.size() * 4},
                   std::span<const std::uint32_t>(words));
}

TensorView OpData::random(DType dtype, std::initializer_list<std::uint64_t> extents, float low,
                          float high) {
    const TensorView view = empty(dtype, extents);
    const std::uint64_t count = view.num_elements();
    const bool bf16 = dtype == DType::BF16;
    std::vector<std::uint32_t> words(bf16 ? (count + 1) / 2 : count, 0);
    for (std::uint64_t i = 0; i < count; ++i) {
        const auto value = static_cast<float>(random_.uniform(low, high));
        if (bf16) {
            words[i / 2] |= std::uint32_t{reference::bf16_bits(value)} << (16 * (i % 2));
        } else {
            words[i] = std::bit_cast<std::uint32_t>(value);
        }
    }
    upload(view, words);
    return view;
}

TensorView OpData::indices(DType dtype, std::initializer_list<std::uint64_t> extents,
                           std::uint64_t below) {
    const TensorView view = empty(dtype, extents);
    std::vector<std::uint32_t> words(view.num_elements());
    for (std::uint32_t& word : words) {
        word = static_cast<std::uint32_t>(random_.below(below));
    }
    upload(view, words);
    return view;
}

TensorView OpData::values(std::initializer_list<std::uint64_t> extents,
                          const std::vector<float>& from) {
    const TensorView view = empty(DType::F32, extents);
    device_.upload(view.buffer.sub(0, from.size() * 4), std::span<const float>(from));
    return view;
}

std::vector<double> OpData::read(const TensorView& view) const {
    return checks::OpRig(device_).read<double>(view);
}

std::string compare(const char* what, std::uint64_t at, double actual, double expected,
                    double tolerance, double scale) {
    if (std::abs(actual - expected) <= tolerance * (std::abs(expected) + scale)) {
        return "";
    }
    return std::string(what) + "[" + std::to_string(at) + "] is " + std::to_string(actual) +
           ", expected " + std::to_string(expected);
}

Spread time_recorded(Device& device, const std::function<void(Recording&)>& record, double least) {
    Recording once(device, QueueRole::Compute, "once");
    record(once);
    device.submit(once).wait(); // compiles
    const double estimate = warm_up(device, once, 0.1);
    const auto repetitions =
        static_cast<std::uint64_t>(std::clamp(0.02 / std::max(estimate, 1e-6), 1.0, 200.0));
    Recording many(device, QueueRole::Compute, "bench");
    for (std::uint64_t i = 0; i < repetitions; ++i)
        record(many);
    // An H200 can take 0.35 s of uninterrupted work before it stops being up to three times slower.
    warm_up(device, many, 0.5);
    std::vector<double> times;
    for (double total = 0; total < least || times.size() < least_repeats(); total += times.back())
        times.push_back(seconds_of(device, many));
    return spread_of(std::move(times)).scaled(1 / static_cast<double>(repetitions));
}

void run_workload(benchmark::State& state, OpData& data, const Workload& workload,
                  const Ceiling& ceiling) {
    Device& device = data.device();
    Recording once(device, QueueRole::Compute, "check");
    workload.record(once);
    device.submit(once).wait();
    if (const std::string wrong = workload.verify(); !wrong.empty()) {
        state.SkipWithError(("wrong result: " + wrong).c_str());
        return;
    }
    for (auto _ : state) {
        const Spread times = time_recorded(device, workload.record);
        const double seconds = times.median;
        state.SetIterationTime(seconds);
        state.counters["min_us"] = 1e6 * times.least;
        state.counters["max_us"] = 1e6 * times.most;
        state.counters["GB/s"] = 1e-9 * workload.bytes / seconds;
        if (workload.flops > 0)
            state.counters["GFLOPS"] = 1e-9 * workload.flops / seconds;
        if (ceiling.rate > 0)
            state.counters["of_" + ceiling.name + "_peak"] =
                static_cast<double>(state.counters[ceiling.unit]) / ceiling.rate;
    }
}

} // namespace bellows::bench
