// SPDX-License-Identifier: MIT
#include "support/program.hpp"

#include "support/clock.hpp"
#include "support/common_options.hpp"
#include "support/json_file.hpp"
#include "support/table.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>

namespace bellows::bench {

namespace {

constexpr const char* kOwnHelp = R"(  --seconds S       least time of each benchmark (default 0.5)
  --no-columns      neither device nor column names: the table of another
                    program goes on
  --list            show the names of the benchmarks

Each result is checked before it is timed; a wrong one is a failed row and exit code 1.
)";

double least = 0.5;
std::uint64_t repeats = 3;

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

std::uint64_t least_repeats() noexcept {
    return repeats;
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

std::vector<std::string> Arguments::split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t end = std::min(text.find(separator, at), text.size());
        parts.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return parts;
}

std::optional<std::vector<std::vector<std::uint64_t>>>
Arguments::sizes(const std::string& name, const std::string& form, std::uint64_t least) {
    const auto text = value(name);
    if (!text)
        return std::nullopt;
    std::vector<std::vector<std::uint64_t>> lists;
    for (const std::string& part : *text == "none" ? std::vector<std::string>() : split(*text)) {
        std::vector<std::uint64_t> numbers;
        for (const std::string& word : split(part, 'x')) {
            std::uint64_t number = 0;
            const char* end = word.data() + word.size();
            if (const auto read = std::from_chars(word.data(), end, number);
                read.ec == std::errc() && read.ptr == end && number >= least)
                numbers.push_back(number);
        }
        if (split(part, 'x').size() != numbers.size() || numbers.size() != split(form, 'x').size())
            throw Error(ErrorCode::InvalidArgument,
                        name + ": \"" + part + "\" is no " + form + "; see --help");
        lists.push_back(std::move(numbers));
    }
    return lists;
}

std::uint64_t Arguments::number(const std::string& name, std::uint64_t usual, std::uint64_t least,
                                std::uint64_t most) {
    const auto lists = sizes(name, "N", least);
    if (!lists)
        return usual;
    if (lists->size() != 1 || lists->front().front() > most)
        throw Error(ErrorCode::InvalidArgument,
                    name + " takes one number" +
                        (most == UINT64_MAX ? "" : " of at most " + std::to_string(most)) +
                        "; see --help");
    return lists->front().front();
}

std::vector<DType> Arguments::storage(const std::string& name) {
    std::vector<DType> chosen;
    for (const std::string& text : split(value(name).value_or("f32,bf16"))) {
        if (text != to_string(DType::F32) && text != to_string(DType::BF16))
            throw Error(ErrorCode::InvalidArgument,
                        name + ": \"" + text + "\" is no storage; see --help");
        chosen.push_back(text == to_string(DType::F32) ? DType::F32 : DType::BF16);
    }
    return chosen;
}

void Program::add_benchmark(const std::string& name, std::function<void(benchmark::State&)> body) {
    benchmark::RegisterBenchmark(name.c_str(),
                                 [this, body = std::move(body)](benchmark::State& state) {
                                     try {
                                         body(state);
                                         if (const auto mhz = clock_mhz(device_->info()))
                                             state.counters["MHz"] = *mhz;
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

Ceiling Program::measure(Device& device, Ceiling (*peak)(Device&)) {
    if (list_)
        return {};
    const Ceiling ceiling = peak(device);
    if (ceiling.rate > 0) {
        char text[64];
        std::snprintf(text, sizeof text, "%.2f %s", ceiling.rate, ceiling.unit.c_str());
        add_context(ceiling.name + "_peak", text);
    }
    return ceiling;
}

/// What a reader of the JSON needs to compare it with another; the table shows the device, unless
/// it goes on another program's.
void Program::add_device_context(const DeviceInfo& info, bool columns) {
    if (columns)
        context_.push_back("device: " + info.name + ", " + info.driver + "; " + build_type() +
                           " build");
    benchmark::AddCustomContext("device", info.name);
    benchmark::AddCustomContext("driver", info.driver);
    benchmark::AddCustomContext("vulkan", info.api_version);
    add_build_context();
}

int Program::run_on_device(Arguments& arguments) {
    DeviceOptions options = DeviceOptions::from_environment({});
    const CommonOptions common = take_common_options(arguments);
    options.select = common.device.value_or(options.select);
    repeats = common.repeats.value_or(repeats);
    const bool columns = !arguments.flag("--no-columns");
    Table table(context_, columns);
    list_ = arguments.flag("--list");
    std::vector<std::string> words = {arguments.rest()[0]};
    if (common.filter)
        words.push_back("--benchmark_filter=" + *common.filter);
    if (const auto seconds = arguments.value("--seconds"))
        least = positive(*seconds);
    if (common.json)
        words.push_back("--benchmark_out=" + *common.json);
    if (list_)
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
    device_ = device.get();
    add_device_context(device->info(), columns);
    add(*device);
    JsonFile json;
    const std::size_t ran =
        benchmark::RunSpecifiedBenchmarks(&table, common.json ? &json : nullptr);
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
            std::cout << help() << kOwnHelp << kCommonOptionsHelp;
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
