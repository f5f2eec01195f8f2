// SPDX-License-Identifier: MIT
#include "support/table.hpp"

#include "support/spread.hpp"

#include <cstdio>
#include <string>

namespace bellows::bench {

namespace {

// Google Benchmark renamed both fields in version 1.8.
template <class Run>
bool has_failed(const Run& run) {
    if constexpr (requires { run.error_occurred; })
        return run.error_occurred;
    else
        return static_cast<int>(run.skipped) != 0;
}
template <class Run>
std::string why_failed(const Run& run) {
    if constexpr (requires { run.error_message; })
        return run.error_message;
    else
        return run.skip_message;
}

std::string number(const benchmark::UserCounters& counters, const char* name, double unit,
                   const char* format) {
    const auto found = counters.find(name);
    if (found == counters.end())
        return "";
    char text[32];
    std::snprintf(text, sizeof text, format, found->second.value * unit);
    return text;
}

std::string range_of(const benchmark::UserCounters& counters) {
    const auto least = counters.find("min_us"), most = counters.find("max_us");
    return least == counters.end() || most == counters.end()
               ? ""
               : range_text({0, least->second.value, most->second.value});
}

/// "85.3 % copy" of the counter "of_copy_peak".
std::string share_of_peak(const benchmark::UserCounters& counters) {
    const std::string begin = "of_", end = "_peak";
    for (const auto& [name, share] : counters) {
        if (!name.starts_with(begin) || !name.ends_with(end))
            continue;
        const std::string peak = name.substr(begin.size(), name.size() - begin.size() - end.size());
        return number(counters, name.c_str(), 100, "%.1f %% ") + peak;
    }
    return "";
}

std::string name_of(const benchmark::BenchmarkReporter::Run& run) {
    std::string name = run.benchmark_name();
    const std::string suffix = "/iterations:1/manual_time";
    const std::size_t at = name.find(suffix);
    return at == std::string::npos ? name : name.erase(at, suffix.size());
}

} // namespace

bool Table::ReportContext(const Context&) {
    for (const std::string& line : context_)
        std::printf("%s\n", line.c_str());
    if (columns_)
        std::printf("%-48s %12s %19s %9s %9s %14s\n", "benchmark", "us", "min-max", "GB/s",
                    "GFLOPS", "of peak");
    return true;
}

void Table::ReportRuns(const std::vector<Run>& runs) {
    for (const Run& run : runs) {
        if (has_failed(run)) {
            failed_ = true;
            std::printf("%-48s FAILED: %s\n", name_of(run).c_str(), why_failed(run).c_str());
            continue;
        }
        std::printf("%-48s %12.2f %19s %9s %9s %14s  %s\n", name_of(run).c_str(),
                    run.GetAdjustedRealTime(), range_of(run.counters).c_str(),
                    number(run.counters, "GB/s", 1, "%.2f").c_str(),
                    number(run.counters, "GFLOPS", 1, "%.1f").c_str(),
                    share_of_peak(run.counters).c_str(), run.report_label.c_str());
    }
    std::fflush(stdout);
}

} // namespace bellows::bench
