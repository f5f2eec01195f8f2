// SPDX-License-Identifier: MIT
#pragma once

// A batch that grows over the first steps of a run. Its sizes follow from the configuration alone,
// not from the number of ranks, so every layout sees the same sequences in the same steps, and so
// does a run that is resumed. Pure functions of plain values.

#include <bellows/shape/config.hpp>
#include <bellows/shape/layout.hpp>

#include <cstdint>
#include <vector>

namespace bellows {

/// The steps before `steps` have start, start + increment, ... sequences, each size for the same
/// number of steps up to rounding; all later steps have `full` sequences.
struct BatchRamp {
    std::uint64_t full = 0;
    std::uint64_t start = 0;     ///< 0: there is no ramp
    std::uint64_t increment = 0; ///< divides full - start
    std::uint64_t steps = 0;

    /// Returns how many sequences step `step` (from 0) has.
    std::uint64_t batch(std::uint64_t step) const noexcept;
    /// Returns how many sequences all steps before `step` have together, modulo 2^64.
    std::uint64_t before(std::uint64_t step) const noexcept;
    /// Returns all sizes, ascending; the last one is `full`.
    std::vector<std::uint64_t> sizes() const;
    bool operator==(const BatchRamp&) const = default;

private:
    std::uint64_t increments() const noexcept {
        return start == 0 ? 0 : (full - start) / increment;
    }
};

/// Returns the ramp of a configuration.
BatchRamp batch_ramp(const TrainingShape& shape) noexcept;

/// Returns how many micro-batches a data-parallel rank has in a step of so many sequences. A
/// micro-batch has as many sequences in every step.
std::uint64_t micro_batches_of(const TrainingShape& shape, std::uint64_t batch) noexcept;

/// Checks that every size divides into micro-batches that the pipeline's schedule takes. Throws
/// Error{InvalidArgument} with the numbers and the way out.
void check_batch_ramp(const ModelConfig& model, const TrainingShape& shape,
                      const RunLayout& layout);

} // namespace bellows
