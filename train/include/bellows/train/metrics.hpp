// SPDX-License-Identifier: MIT
#pragma once

// The figures of a run's steps, and metrics.jsonl, which has one JSON object per step. Rank 0 only,
// one thread.

#include <bellows/base/files.hpp>
#include <bellows/train/expert_balance.hpp>
#include <bellows/train/step_parts.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// One step of the whole run; names with units are the keys of metrics.jsonl. There `loss` stands
/// as loss_nats_per_token, too.
struct StepMetrics {
    std::uint64_t step = 0; ///< from 1: steps done after this one
    double loss = 0;        ///< nats per token, mean over the global batch
    double grad_norm = 0;   ///< before clipping
    double lr = 0;
    double tokens_per_s = 0;
    double seconds = 0;                ///< wall time of this step
    double model_flops_per_s = 0;      ///< training_flops_per_token(), of all ranks together
    std::uint64_t bytes_exchanged = 0; ///< sent by all ranks together
    double seconds_waited = 0;         ///< for others, mean over the ranks
    /// `loss` by the bytes that a token has; files of older runs have none.
    std::optional<double> loss_nats_per_byte{};
    /// Nats per token and per byte, of steps after which it was looked at (eval_every).
    std::optional<double> held_out_loss{}, held_out_loss_nats_per_byte{};
    /// Of each MTP module, the first one first: nats per token that it predicts.
    std::vector<double> mtp_losses_nats_per_token{};
    std::vector<ExpertBalance> experts{}; ///< of each layer that has some, ascending
    std::vector<MovedExpert> moves{};     ///< of experts, before this step
    /// model_flops_per_s of each rank, and their share of what its device could do at most.
    std::optional<double> model_flops_per_s_per_rank{}, mfu{};
    std::optional<StepParts> parts{};         ///< of rank 0; "parts" with names of StepParts
    std::optional<std::uint64_t> sequences{}; ///< of the step's batch
};

/// One line of JSON without its line break; what is not finite becomes null. Figures of the balance
/// of experts have four digits behind the point; empty lists are left out.
std::string format_metrics(const StepMetrics& metrics);
/// Calls each() for every step of a file written by MetricsLog, line by line, so that the file may
/// be of any size. Lines that are no such object or have more than 16 MiB are left out, and so are
/// layers and moves that are not as they should be; a null is read as NaN. Throws Error{Io}.
void read_metrics(const std::filesystem::path& path,
                  const std::function<void(StepMetrics&& step)>& each);
std::vector<StepMetrics> read_metrics(const std::filesystem::path& path);

class MetricsLog {
public:
    /// Starts the file of a fresh run (steps_done 0), or continues that of a resumed run: lines of
    /// steps after steps_done, and any half line, are dropped. Throws Error{Io}.
    MetricsLog(std::filesystem::path path, std::uint64_t steps_done);
    /// Appends a line; other programs can follow the file. Throws Error{Io}: then the file ends
    /// with a whole line as before, and the next call writes this line, too.
    void add(const StepMetrics& metrics);
    /// All steps so far, those before the resume included, without what is of single experts: that
    /// is in the file alone, as it may be too much for the memory.
    const std::vector<StepMetrics>& steps() const noexcept { return steps_; }

private:
    void keep(StepMetrics step);

    std::filesystem::path path_;
    FileHandle file_;
    std::vector<StepMetrics> steps_;
    std::uint64_t written_ = 0; ///< bytes of whole lines in the file
    std::string missing_;       ///< lines that could not be written
};

} // namespace bellows
