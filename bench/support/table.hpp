// SPDX-License-Identifier: MIT
#pragma once

// Results as a table: time and its spread, GB/s, GFLOPS, the share of a peak, what went wrong.

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

namespace bellows::bench {

class Table : public benchmark::BenchmarkReporter {
public:
    /// context: lines above the table, looked at when it begins. columns: false when the table of
    /// another program goes on.
    Table(const std::vector<std::string>& context, bool columns)
        : context_(context), columns_(columns) {}

    bool ReportContext(const Context& context) override;
    void ReportRuns(const std::vector<Run>& runs) override;

    /// Whether a benchmark found its result wrong or could not run.
    bool failed() const { return failed_; }

private:
    const std::vector<std::string>& context_;
    bool columns_;
    bool failed_ = false;
};

} // namespace bellows::bench
