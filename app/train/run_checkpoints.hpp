// SPDX-License-Identifier: MIT
#pragma once

// The checkpoints of one run: when one is due, how it is written, which ones stay, and the loss
// that tells good ones from bad.

#include "app/commands.hpp"

#include <bellows/comm/world.hpp>
#include <bellows/text/tokenizer.hpp>
#include <bellows/train/loss_watch.hpp>
#include <bellows/train/metrics.hpp>
#include <bellows/train/trainer.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace bellows {

/// Every rank has one. Only save() is collective.
class RunCheckpoints {
public:
    /// note: rank 0's, gets the lines that a person should read.
    RunCheckpoints(const TrainOptions& options, World& world,
                   std::function<void(const std::string&)> note);

    /// Before the first step. `from`: the checkpoint that the run goes on from, or empty. `before`:
    /// rank 0's, the steps before that.
    void begin(const std::filesystem::path& from, const std::vector<StepMetrics>& before);
    /// Rank 0's, after each step (from 1): one warning each time that the loss begins to explode.
    void watch_loss(std::uint64_t step, double loss);
    /// Whether checkpoint_minutes have gone by since the last one.
    bool is_due_by_time() const;
    /// Writes one. A full disk is a warning. Throws Error{Diverged} if a weight is not finite.
    void save(Trainer& trainer, const Tokenizer& tokenizer, std::uint64_t steps_done);

    /// Whether the last one could be written.
    bool has_saved() const noexcept { return saved_; }
    /// The newest that is written, or that the run goes on from.
    const std::filesystem::path& last() const noexcept { return last_; }

private:
    using Clock = std::chrono::steady_clock;

    void find_good();
    std::string way_back() const;
    void remove_older();

    const TrainOptions& options_;
    World& world_;
    std::function<void(const std::string&)> note_;
    std::filesystem::path last_;
    Clock::time_point last_try_ = Clock::now();
    bool saved_ = false;
    // Rank 0's:
    LossWatch watch_;
    double loss_ = 0;            ///< of the last step
    bool exploded_ = false;      ///< the last loss
    std::filesystem::path good_; ///< the newest whose loss had not exploded
};

} // namespace bellows
