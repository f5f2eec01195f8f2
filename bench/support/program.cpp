// SPDX-License-Identifier: MIT
#include "support/program.hpp"

#include "support/table.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>

namespace bellows::bench {

namespace {

constexpr const char* kCommonHelp = R"(
  --device INDEX|UUID|gpu|cpu|any   where to run (default: BELLOWS_DEVICE, else any)
  --filter REGEX                    only benchmarks whose name matches
  --seconds S                       least time of each benchmark (default 0.5)
  --json FILE                       results in Google Benchmark's JSON, too
  --no-columns                      neither device nor column names: another program's table goes on
  --list                            the names of the benchmarks
  --help

Each result is checked before it is timed; a wrong one is a failed row and exit code 1.
)";

double least = 0.5;

double positive(const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || *end != 0 || !(value > 0))
        throw Error(ErrorCode::InvalidArgument, "--seconds " + text + " is no time; see --help");
    return value;
}

} // namespace

double least_seconds() noexcept {
    return least;
}

bool Arguments::flag(const std::string& name) {
    const auto kept = std::remove(words_.begin() + 1, words_.end(), name);
    const bool found = kept != words_.end();
    words_.erase(kept, words_.end());
    return found;
}

std::optional<std::string> Arguments::value(const std::string& name) {
    std::optional<std::string> found;
    for (auto word = std::find(words_.begin() + 1, words_.end(), name); word != words_.end();
         word = std::find(words_.begin() + 1, words_.end(), name)) {
        if (word + 1 == words_.end())
            throw Error(ErrorCode::InvalidArgument, name + " needs a value; see --help");
        found = *(word + 1);
        words_.erase(word, word + 2);
    }
    return found;
}

std::vector<std::string> Arguments::split(const std::string& text) {
    std::vector<std::string> parts;
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t comma = std::min(text.find(',', at), text.size());
        parts.push_back(text.substr(at, comma - at));
        at = comma + 1;
    }
    return parts;
}

void Program::add_benchmark(const std::string& name, std::function<void(benchmark::State&)> body) {
    benchmark::RegisterBenchmark(name.c_str(),
                                 [body = std::move(body)](benchmark::State& state) {
                                     try {
                                         body(state);
                                     } catch (const Error& error) {
                                         state.SkipWithError(error.what());
                                     }
                                 })
        ->UseManualTime()
        ->Iterations(1) // which times as long as least_seconds() says
        ->Unit(benchmark::kMicrosecond);
}

void Program::add_context(const std::string& key, const std::string& value) {
    benchmark::AddCustomContext(key, value);
    context_.push_back(key + ": " + value);
}

int Program::run_on_device(Arguments& arguments) {
    DeviceOptions options = DeviceOptions::from_environment({});
    if (const auto device = arguments.value("--device"))
        options.select = *device;
    const bool columns = !arguments.flag("--no-columns");
    Table table(context_, columns);
    const bool list = arguments.flag("--list");
    std::vector<std::string> words = {arguments.rest()[0]};
    if (const auto filter = arguments.value("--filter"))
        words.push_back("--benchmark_filter=" + *filter);
    if (const auto seconds = arguments.value("--seconds"))
        least = positive(*seconds);
    const auto json = arguments.value("--json");
    if (json)
        words.insert(words.end(), {"--benchmark_out=" + *json, "--benchmark_out_format=json"});
    if (list)
        words.push_back("--benchmark_list_tests=true");
    take(arguments);
    if (arguments.rest().size() > 1)
        throw Error(ErrorCode::InvalidArgument,
                    "\"" + arguments.rest()[1] + "\" is no option; see --help");
    configure(options);

    std::vector<char*> pointers;
    for (std::string& word : words)
        pointers.push_back(word.data());
    int count = static_cast<int>(pointers.size());
    benchmark::Initialize(&count, pointers.data());

    const std::unique_ptr<Device> device = Device::create(options);
    const std::string name = device->info().name + ", " + device->info().driver;
    if (columns)
        add_context("device", name);
    else
        benchmark::AddCustomContext("device", name);
    add(*device);
    const std::size_t ran = benchmark::RunSpecifiedBenchmarks(&table);
    benchmark::ClearRegisteredBenchmarks(); // they refer to the device
    finish();
    if (ran == 0)
        throw Error(ErrorCode::InvalidArgument, "no benchmark matches; --list names them");
    return table.failed() ? 1 : 0;
}

int Program::run(int argc, char** argv) {
    try {
        Arguments arguments(argc, argv);
        if (arguments.flag("--help") || arguments.flag("-h")) {
            std::cout << help() << kCommonHelp;
            return 0;
        }
        return run_on_device(arguments);
    } catch (const Error& error) {
        std::cerr << error.what() << "\n";
        switch (error.code()) {
        case ErrorCode::InvalidArgument:
            return 2;
        case ErrorCode::Unsupported:
            return 3;
        default:
            return 1;
        }
    }
}

} // namespace bellows::bench
