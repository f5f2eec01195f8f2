// SPDX-License-Identifier: MIT
#pragma once

// What a run says at its end. Pure functions, any thread.

#include <bellows/text/words.hpp>
#include <bellows/train/metrics.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

struct RunSummary {
    double first_loss = 0;               ///< first step of the run, resumed part included
    double last_loss = 0;                ///< mean of the last steps
    std::optional<double> held_out_loss; ///< of text kept out of training
    std::uint64_t steps = 0;
    double seconds = 0;
    double tokens_per_s = 0;
    double model_flops_per_s = 0; ///< of all ranks
    std::optional<double> model_flops_per_s_per_rank{}, mfu{};
    std::optional<StepParts> part_shares{}; ///< of rank 0's time, instead of seconds
    double bytes_per_token = 1;
    std::filesystem::path loss_picture; ///< empty paths and texts are left out
    std::filesystem::path expert_picture;
    std::filesystem::path trace;
    std::filesystem::path checkpoint;
    std::filesystem::path pipeline_picture;
    std::string memory;   ///< the most that was in use, by category
    std::string pipeline; ///< format_report()
    std::string pairs;    ///< how their nodes are interleaved
    std::string sample;
    WordCheck words; ///< of the sample that stand in the training text
};

/// Losses and speed from the steps of a run: last_loss is the mean of the last tenth, at most 20
/// steps; the speed leaves out the first step, which also compiles, if there are more.
RunSummary summarize(const std::vector<StepMetrics>& steps);
/// Several lines, the last with a line break.
std::string format_summary(const RunSummary& summary);

} // namespace bellows
