// SPDX-License-Identifier: MIT
#pragma once

// Tells when a run's loss explodes. Host only, one thread.

#include <cstdint>
#include <optional>

namespace bellows {

/// The reference is the lowest mean of the last kSmoothed losses. A loss explodes that is not
/// finite, or above the reference by half of what a model loses that guesses: ln(vocabulary).
class LossWatch {
public:
    static constexpr double kSmoothed = 16;

    explicit LossWatch(std::uint64_t vocabulary);

    /// Whether a loss, nats per token, has exploded.
    bool exploded(double loss) const;
    /// Takes the loss of the next step. One that has exploded is no part of the mean.
    void take(double loss);
    /// The reference, once a loss has been taken.
    std::optional<double> best() const noexcept { return best_; }

private:
    double margin_;
    double mean_ = 0;
    std::uint64_t taken_ = 0;
    std::optional<double> best_;
};

} // namespace bellows
