// SPDX-License-Identifier: MIT
#pragma once

// How far a run is, for a person who watches it. Rank 0 only, one thread.

#include <bellows/train/metrics.hpp>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

inline constexpr const char* kTerminalVariable = "BELLOWS_TERMINAL";

/// Tells a person how far the run is: one line that is rewritten in place on a terminal, else a
/// plain line now and then.
class ProgressReporter {
public:
    struct Options {
        bool terminal = false;
        unsigned columns = 80;      ///< of the terminal; what finds no room is left out
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
    /// The same as a share, e.g. "tokenising the text 42 %". total: at least 1.
    void percent(std::string_view what, std::uint64_t done, std::uint64_t total);
    /// Bytes that are read or written, and how fast: "reading weights 1.2 GB of 29.3 GB, 11.0
    /// GB/s". seconds: since it began.
    void bytes(std::string_view what, std::uint64_t done, std::uint64_t total, double seconds);
    void step(const StepMetrics& metrics);
    /// A line that stays, e.g. a warning.
    void note(std::string_view line);
    /// Leaves the last progress line standing.
    void finish();

private:
    void show(const std::string& line, bool always);
    /// The part that matters most stands first.
    std::vector<std::string> parts_of(const StepMetrics& metrics, bool narrow) const;

    std::FILE* stream_;
    std::uint64_t total_steps_;
    Options options_;
    std::string line_; // now on the terminal
    double last_shown_ = -1e300;
    double seconds_per_step_ = 0; // smoothed
};

} // namespace bellows
