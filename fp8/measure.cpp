// SPDX-License-Identifier: MIT
#include <bellows/fp8/choice.hpp>

#include "product_case.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <chrono>

namespace bellows::fp8 {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double seconds_of(Device& device, Recording& recording) {
    const auto begin = Clock::now();
    device.submit(recording).wait();
    return seconds_since(begin);
}

/// What it takes to hand work in and to learn that it has ended.
double submission_seconds(Device& device) {
    const Buffer buffer(device, {.name = "nothing", .bytes = 16});
    Recording recording(device, QueueRole::Compute, "nothing");
    recording.fill(buffer.view(), 0);
    double least = seconds_of(device, recording);
    for (int i = 0; i < 10; ++i)
        least = std::min(least, seconds_of(device, recording));
    return least;
}

/// A variant's recording, with as many repetitions as make up for the submission.
struct Turn {
    VariantTime* result;
    Recording recording;
    std::uint64_t repetitions;
};

class Stopwatch {
public:
    explicit Stopwatch(Device& device)
        : device_(device), cpu_(device.info().is_cpu), submission_(submission_seconds(device)) {}

    /// Of variants that can compute it, the least time of some rounds in which they take turns.
    void time(ProductCase& product, Measurement& measurement, Timed which) {
        std::string usual_class;
        for (const VariantTime& v : measurement.variants)
            if (v.variant == measurement.usual)
                usual_class = v.numeric_class;
        std::vector<Turn> all;
        for (VariantTime& v : measurement.variants)
            if (v.why_not.empty() && (which == Timed::All || v.numeric_class == usual_class))
                all.push_back(prepare(product, v));
        warm_up(all);
        const auto start = Clock::now();
        for (int round = 0; round < kRounds; ++round) {
            for (Turn& turn : all) {
                const double taken = seconds_of(device_, turn.recording);
                const double net = std::max(taken - submission_, 0.1 * taken) /
                                   static_cast<double>(turn.repetitions);
                double& least = turn.result->seconds;
                least = least == 0 ? net : std::min(least, net);
            }
            if (round > 0 && seconds_since(start) > (cpu_ ? 0.03 : 0.1))
                break;
        }
    }

    /// Seconds of first runs.
    double compiling() const noexcept { return compiling_; }

private:
    static constexpr int kRounds = 4;

    Turn prepare(ProductCase& product, VariantTime& v) {
        Recording once(device_, QueueRole::Compute, "a product to be timed");
        product.record(once, v.variant, 0);
        compiling_ += seconds_of(device_, once);
        const double estimate = std::max(seconds_of(device_, once) - submission_, 1e-6);
        const double target = cpu_ ? 4e-3 : 1.5e-3;
        const auto repetitions =
            static_cast<std::uint64_t>(std::clamp(target / estimate, 1.0, 100.0));
        Turn turn{&v, Recording(device_, QueueRole::Compute, "products to be timed"), repetitions};
        for (std::uint64_t i = 0; i < repetitions; ++i)
            product.record(turn.recording, v.variant, i);
        return turn;
    }

    /// Clocks of a GPU that waited while pipelines were compiled take a while to rise.
    void warm_up(std::vector<Turn>& turns) {
        constexpr double kWarm = 0.1; // seconds
        if (cpu_ || turns.empty())
            return;
        for (const auto start = Clock::now(); seconds_since(start) < kWarm;)
            for (Turn& turn : turns)
                seconds_of(device_, turn.recording);
    }

    Device& device_;
    bool cpu_;
    double submission_;
    double compiling_ = 0;
};

} // namespace

std::vector<Measurement> measure(Device& device, const MeasureOptions& options) {
    constexpr double kUsualLimit = 20; // seconds
    const double limit = options.limit > 0 ? options.limit : kUsualLimit;
    const auto start = Clock::now();
    std::optional<Stopwatch> stopwatch;
    const auto spent = [&] {
        return seconds_since(start) - (stopwatch ? stopwatch->compiling() : 0);
    };
    std::vector<Measurement> all;
    const auto& kinds = product_kinds();
    for (const ProductKind& kind : kinds) {
        ProductCase product(device, kind);
        Measurement& measurement = all.emplace_back(product.facts());
        if (options.timed != Timed::None && spent() < limit) {
            try {
                product.allocate();
                if (!stopwatch)
                    stopwatch.emplace(device);
                stopwatch->time(product, measurement, options.timed);
            } catch (const Error& error) {
                if (error.code() != ErrorCode::OutOfMemory)
                    throw;
            }
        }
        if (options.on_progress)
            options.on_progress(all.size(), kinds.size());
    }
    return all;
}

} // namespace bellows::fp8
