// SPDX-License-Identifier: MIT
#include <bellows/shape/batch_ramp.hpp>

#include "base/toml_fields.hpp"

#include <algorithm>
#include <string>

namespace bellows {

using toml_fields::refuse;

namespace {

/// The sum of floor(a i / m) over i from 0 to n - 1, in as many rounds as Euclid's algorithm takes
/// for a and m.
std::uint64_t sum_of_floors(std::uint64_t n, std::uint64_t m, std::uint64_t a) noexcept {
    std::uint64_t sum = 0, b = 0; // the sum is of floor((a i + b) / m)
    while (n > 0) {
        sum += (n % 2 == 0 ? n / 2 * (n - 1) : (n - 1) / 2 * n) * (a / m) + n * (b / m);
        a %= m;
        b %= m;
        const std::uint64_t most = a * n + b;
        if (most < m)
            break;
        n = most / m;
        b = most % m;
        std::swap(a, m);
    }
    return sum;
}

} // namespace

std::uint64_t BatchRamp::batch(std::uint64_t step) const noexcept {
    return start == 0 || step >= steps ? full : start + increment * (step * increments() / steps);
}

std::uint64_t BatchRamp::before(std::uint64_t step) const noexcept {
    if (start == 0)
        return step * full;
    const std::uint64_t ramped = std::min(step, steps);
    return ramped * start +
           increment * sum_of_floors(ramped, std::max<std::uint64_t>(steps, 1), increments()) +
           (step - ramped) * full;
}

std::vector<std::uint64_t> BatchRamp::sizes() const {
    std::vector<std::uint64_t> all;
    for (std::uint64_t i = 0; i < increments(); ++i)
        all.push_back(start + i * increment);
    all.push_back(full);
    return all;
}

BatchRamp batch_ramp(const TrainingShape& shape) noexcept {
    if (shape.batch_start == 0)
        return {.full = shape.batch};
    return {.full = shape.batch,
            .start = shape.batch_start,
            .increment = shape.batch_increment > 0 ? shape.batch_increment : shape.batch_start,
            .steps = shape.batch_ramp_steps};
}

std::uint64_t micro_batches_of(const TrainingShape& shape, std::uint64_t batch) noexcept {
    return batch / (shape.batch / shape.micro_batches);
}

void check_batch_ramp(const ModelConfig& model, const TrainingShape& shape,
                      const RunLayout& layout) {
    const auto text = [](std::uint64_t value) { return std::to_string(value); };
    if (shape.batch_start == 0) {
        if (shape.batch_increment > 0 || shape.batch_ramp_steps > 0)
            refuse("batch_increment = " + text(shape.batch_increment) + " and batch_ramp_steps = " +
                   text(shape.batch_ramp_steps) + " are of no use without batch_start");
        return;
    }
    const BatchRamp ramp = batch_ramp(shape);
    if (shape.batch_ramp_steps == 0 || shape.batch_start > shape.batch ||
        (shape.batch - shape.batch_start) % ramp.increment != 0)
        refuse("batch_start = " + text(shape.batch_start) + " must come to batch = " +
               text(shape.batch) + " by whole increments of " + text(ramp.increment) +
               " (batch_increment) in batch_ramp_steps = " + text(shape.batch_ramp_steps) +
               " steps, at least one");
    constexpr std::uint64_t kMostSizes = 1024; // each takes a schedule
    if ((ramp.full - ramp.start) / ramp.increment >= kMostSizes)
        refuse("batch_increment = " + text(ramp.increment) + " makes more than " +
               text(kMostSizes) + " sizes of the batch; raise it");
    const std::uint64_t unit = shape.batch / shape.micro_batches; // of all ranks
    if (ramp.start % unit != 0 || (ramp.start < ramp.full && ramp.increment % unit != 0))
        refuse("batch_start = " + text(ramp.start) + " and batch_increment = " +
               text(ramp.increment) + " must be multiples of the " + text(unit) +
               " sequences that the ranks have in a micro-batch each (batch / micro_batches); " +
               "raise micro_batches, now " + text(shape.micro_batches));
    for (const std::uint64_t size : ramp.sizes()) {
        TrainingShape step = shape;
        step.micro_batches = micro_batches_of(shape, size);
        try {
            (void)pipeline_schedule(model, step, layout);
        } catch (const Error& error) {
            refuse("a step of the batch's ramp has " + text(size) + " sequences, " +
                   text(step.micro_batches) + " micro-batches: " + error.message());
        }
    }
}

} // namespace bellows
