// SPDX-License-Identifier: MIT
#pragma once

// What a run says about itself: metrics.jsonl (one JSON object per step), the progress line, and
// the summary at the end. Rank 0 only, one thread.

#include "app/file_io.hpp"
#include "app/sampling.hpp"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// One step of the whole run; names with units are the keys of metrics.jsonl.
struct StepMetrics {
    std::uint64_t step = 0; ///< from 1: steps done after this one
    double loss = 0;        ///< nats per token, mean over the global batch
    double grad_norm = 0;   ///< before clipping
    double lr = 0;
    double tokens_per_s = 0;
    double seconds = 0;                ///< wall time of this step
    double model_flops_per_s = 0;      ///< of the model's formula, without recomputation
    std::uint64_t bytes_exchanged = 0; ///< sent by all ranks together
    double seconds_waited = 0;         ///< for others, mean over the ranks
};

/// One line of JSON without its line break; what is not finite becomes null.
std::string format_metrics(const StepMetrics& metrics);
/// Of a file written by MetricsLog. Lines that are no such object are left out; a null is read as
/// NaN. Throws Error{Io}.
std::vector<StepMetrics> read_metrics(const std::filesystem::path& path);

class MetricsLog {
public:
    /// Starts the file of a fresh run (steps_done 0), or continues that of a resumed run: lines of
    /// steps after steps_done, and any half line, are dropped. Throws Error{Io}.
    MetricsLog(std::filesystem::path path, std::uint64_t steps_done);
    /// Appends a line; other programs can follow the file. Throws Error{Io}.
    void add(const StepMetrics& metrics);
    /// All steps so far, those before the resume included.
    const std::vector<StepMetrics>& steps() const noexcept { return steps_; }

private:
    std::filesystem::path path_;
    FileHandle file_;
    std::vector<StepMetrics> steps_;
};

/// 1234567 → "1.23M"; three digits and a suffix of k, M, G, T, P.
std::string format_count(double value);
/// 75 → "1:15", 3675 → "1:01:15".
std::string format_duration(double seconds);

inline constexpr const char* kTerminalVariable = "BELLOWS_TERMINAL";

/// Tells a person how far the run is: one line that is rewritten in place on a terminal, else a
/// plain line now and then.
class ProgressReporter {
public:
    struct Options {
        bool terminal = false;
        unsigned columns = 80;      ///< of the terminal; longer lines are cut
        double plain_interval = 10; ///< seconds between plain lines
        /// Seconds since any fixed moment; empty: a steady clock. For tests.
        std::function<double()> clock;
    };
    /// Whether `stream` is a terminal, and how wide. A rank that was started by the launcher has a
    /// pseudo-terminal whatever the launcher's own output is, so kTerminalVariable has the last
    /// word.
    static Options detect(std::FILE* stream);
    /// What the launcher puts into kTerminalVariable: the terminal's columns, "0" if it is none.
    static std::string terminal_of(std::FILE* stream);

    /// The stream stays the caller's.
    ProgressReporter(std::FILE* stream, std::uint64_t total_steps, Options options);
    ~ProgressReporter();
    ProgressReporter(const ProgressReporter&) = delete;
    ProgressReporter& operator=(const ProgressReporter&) = delete;

    /// Work before the first step, e.g. phase("reading", 12, 80); total 0: nobody knows it.
    void phase(std::string_view what, std::uint64_t done, std::uint64_t total);
    void step(const StepMetrics& metrics);
    /// A line that stays, e.g. a warning.
    void note(std::string_view line);
    /// Leaves the last progress line standing.
    void finish();

private:
    void show(const std::string& line, bool always);

    std::FILE* stream_;
    std::uint64_t total_steps_;
    Options options_;
    std::string line_; // now on the terminal
    double last_shown_ = -1e300;
    double seconds_per_step_ = 0; // smoothed
};

struct RunSummary {
    double first_loss = 0; ///< first step of the run, resumed part included
    double last_loss = 0;  ///< mean of the last steps
    std::uint64_t steps = 0;
    double seconds = 0;
    double tokens_per_s = 0;
    double bytes_per_token = 1;
    std::filesystem::path loss_picture; ///< empty paths and texts are left out
    std::filesystem::path trace;
    std::filesystem::path checkpoint;
    std::string memory; ///< the most that was in use, by category
    std::string sample;
    WordCheck words; ///< of the sample that stand in the training text
};

/// Losses and speed from the steps of a run: last_loss is the mean of the last tenth, at most 20
/// steps; the speed leaves out the first step, which also compiles, if there are more.
RunSummary summarize(const std::vector<StepMetrics>& steps);
/// Several lines, the last with a line break.
std::string format_summary(const RunSummary& summary);

} // namespace bellows
