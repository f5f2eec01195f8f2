// SPDX-License-Identifier: MIT
#include "expert_exchange/results.hpp"

#include "support/json_file.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>

namespace bellows::bench {

namespace {

double algbw(const PhaseResult& result) {
    return 1e-9 * result.bytes / result.seconds;
}

double busbw(const PhaseResult& result, const ExchangeShape& shape) {
    const auto ranks = static_cast<double>(shape.ranks);
    return algbw(result) * (ranks - 1) / ranks;
}

std::string number(const char* format, std::optional<double> value) {
    char text[32] = "";
    if (value)
        std::snprintf(text, sizeof text, format, *value);
    return text;
}

template <class F>
std::optional<double> of(const std::optional<double>& value, F&& change) {
    return value ? std::optional(change(*value)) : std::nullopt;
}

std::string percent(const std::optional<double>& share) {
    return number("%.1f %%", of(share, [](double s) { return 100 * s; }));
}

void print(const ExchangeShape& shape, const PhaseResult& result) {
    const bool copied = !result.sent; // between no ranks
    std::printf(
        "%-46s %11.1f %19s %9s %8.3f %8s %8s %9s %9s %9s %8s %7s %6s %9.4f\n",
        (result.name + "/" + name_of(shape)).c_str(), 1e6 * result.seconds,
        range_text(result.spread.scaled(1e6)).c_str(),
        number("%.1f", of(result.p99, [](double s) { return 1e6 * s; })).c_str(), algbw(result),
        copied ? "" : number("%.3f", busbw(result, shape)).c_str(),
        number("%.2f", of(result.wire, [](double rate) { return 1e-9 * rate; })).c_str(),
        number("%.2f", of(result.sent, [](double b) { return 1e-6 * b; })).c_str(),
        number("%.2f", of(result.sent,
                          [&](double b) { return 1e-6 * b / static_cast<double>(shape.ranks); }))
            .c_str(),
        number("%.2f", of(result.sent_to_nodes, [](double b) { return 1e-6 * b; })).c_str(),
        percent(result.dedup).c_str(), percent(result.fp8).c_str(),
        number("%.2f", of(result.raw_seconds, [&](double raw) { return raw / result.seconds; }))
            .c_str(),
        result.cpu_seconds);
}

/// Goes without a table.
class Silent : public benchmark::BenchmarkReporter {
    bool ReportContext(const Context&) override { return true; }
    void ReportRuns(const std::vector<Run>&) override {}
};

/// How much of what an exchange takes alone is not added to what the products take.
double hidden(const BesideResult& alone, const BesideResult& beside, double exchange) {
    return 1 - (beside.seconds - alone.seconds) / exchange;
}

double seconds_of(const std::vector<PhaseResult>& results, const std::string& name) {
    const auto found = std::find_if(results.begin(), results.end(),
                                    [&](const PhaseResult& r) { return r.name == name; });
    return found->seconds;
}

void print(const std::vector<PhaseResult>& results, const std::vector<BesideResult>& beside) {
    if (beside.empty())
        return;
    const BesideResult& alone = beside.front();
    std::printf("products alone: %.1f us on the device, %.1f us in all\n", 1e6 * alone.products,
                1e6 * alone.seconds);
    for (const BesideResult& result : beside)
        if (!result.name.empty()) {
            const double exchange = seconds_of(results, result.name);
            std::printf("products beside %s: %.1f us on the device (%+.1f %%), %.1f us in all; of "
                        "its %.1f us alone %.0f %% are hidden\n",
                        result.name.c_str(), 1e6 * result.products,
                        100 * (result.products / alone.products - 1), 1e6 * result.seconds,
                        1e6 * exchange, 100 * hidden(alone, result, exchange));
        }
}

void register_rows(const ShapeResults& results) {
    const ExchangeShape& shape = results.shape;
    const auto add = [&](const std::string& name, auto tell) {
        benchmark::RegisterBenchmark((name + "/" + name_of(shape)).c_str(), tell)
            ->UseManualTime()
            ->Iterations(1)
            ->Unit(benchmark::kMicrosecond);
    };
    for (const PhaseResult& result : results.phases)
        add(result.name, [&shape, &result](benchmark::State& state) {
            for (auto _ : state)
                state.SetIterationTime(result.seconds);
            const auto set = [&state](const char* name, std::optional<double> value) {
                if (value)
                    state.counters[name] = *value;
            };
            set("min_us", 1e6 * result.spread.least);
            set("max_us", 1e6 * result.spread.most);
            set("p99_us", of(result.p99, [](double s) { return 1e6 * s; }));
            set("algbw", algbw(result));
            if (result.sent)
                set("busbw", busbw(result, shape));
            set("wire", of(result.wire, [](double rate) { return 1e-9 * rate; }));
            set("bytes_sent", result.sent);
            set("bytes_sent_to_nodes", result.sent_to_nodes);
            set("dedup", result.dedup);
            set("fp8", result.fp8);
            set("of_raw", of(result.raw_seconds, [&](double raw) { return raw / result.seconds; }));
            set("cpu_seconds", result.cpu_seconds);
            set("repeats", static_cast<double>(result.repeats));
        });
    for (const BesideResult& result : results.beside)
        add("products" + (result.name.empty() ? "" : "_beside_" + result.name),
            [&result, &results](benchmark::State& state) {
                for (auto _ : state)
                    state.SetIterationTime(result.products);
                state.counters["seconds_in_all"] = result.seconds;
                state.counters["slower"] = result.products / results.beside.front().products - 1;
            });
}

void write_json(const std::string& file, const Context& context,
                const std::vector<ShapeResults>& results) {
    std::vector<std::string> words = {"bench_expert_exchange", "--benchmark_out=" + file};
    std::vector<char*> pointers;
    for (std::string& word : words)
        pointers.push_back(word.data());
    int count = static_cast<int>(pointers.size());
    benchmark::Initialize(&count, pointers.data());
    for (const auto& [key, value] : context)
        benchmark::AddCustomContext(key, value);
    add_build_context();
    for (const ShapeResults& one : results)
        register_rows(one);
    Silent silent;
    JsonFile json;
    benchmark::RunSpecifiedBenchmarks(&silent, &json);
    benchmark::ClearRegisteredBenchmarks();
}

} // namespace

void write_results(const ExchangeOptions& options, const Context& context,
                   const std::vector<ShapeResults>& results) {
    for (const auto& [key, value] : context)
        if (key != "vulkan")
            std::printf("%s: %s\n", key.c_str(), value.c_str());
    std::printf("build: %s\n", build_type().c_str());
    std::printf("%-46s %11s %19s %9s %8s %8s %8s %9s %9s %9s %8s %7s %6s %9s\n", "benchmark", "us",
                "min-max", "p99", "algbw", "busbw", "wire", "MB", "MB/rank", "to nodes", "dedup",
                "fp8", "raw", "CPU s");
    for (const ShapeResults& one : results) {
        for (const PhaseResult& result : one.phases)
            print(one.shape, result);
        print(one.phases, one.beside);
    }
    std::fflush(stdout);
    if (options.json)
        write_json(*options.json, context, results);
}

} // namespace bellows::bench
