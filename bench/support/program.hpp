// SPDX-License-Identifier: MIT
#pragma once

// What every benchmark program shares: options, one table of results, and exit codes: 0 all right,
// 1 a result was wrong, 2 bad usage, 3 no device that serves. The thread of main() owns all of it.

#include "support/peaks.hpp"

#include <bellows/engine/device.hpp>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace bellows::bench {

/// How long each benchmark is timed at least: --seconds.
double least_seconds() noexcept;
/// How often at least: --repeats.
std::uint64_t least_repeats() noexcept;

/// A command line from which a program takes its own options.
class Arguments {
public:
    Arguments(int argc, char** argv) : words_(argv, argv + argc) {}

    /// Whether the option was there.
    bool flag(const std::string& name);
    /// The word after the last `name`. Throws Error{InvalidArgument} when there is none.
    std::optional<std::string> value(const std::string& name);
    /// Splits a value.
    static std::vector<std::string> split(const std::string& text, char at = ',');
    /// The value "4096x7168x256x8,..." of `name` as lists of as many numbers of `least` or more as
    /// `form` ("TxHxExK") has; none for "none". Throws Error{InvalidArgument} for anything else.
    std::optional<std::vector<std::vector<std::uint64_t>>>
    sizes(const std::string& name, const std::string& form, std::uint64_t least = 1);
    /// The one number of `name` between `least` and `most`, or else `usual`. Throws likewise.
    std::uint64_t number(const std::string& name, std::uint64_t usual, std::uint64_t least,
                         std::uint64_t most = UINT64_MAX);
    /// The value "f32,bf16" of `name`; both without it.
    std::vector<DType> storage(const std::string& name);

    /// What nobody took; the program's name is the first.
    std::vector<std::string>& rest() { return words_; }

private:
    std::vector<std::string> words_;
};

class Program {
public:
    virtual ~Program() = default;
    /// main().
    int run(int argc, char** argv);

protected:
    /// What it times and its own options.
    virtual std::string help() const = 0;
    virtual void take(Arguments&) {}
    virtual void configure(DeviceOptions&) const {}
    /// Makes what all benchmarks use and adds them; the device outlives them.
    virtual void add(Device& device) = 0;
    /// Drops what add() and the benchmarks made on the device.
    virtual void finish() {}

    /// Its row gets the counter "MHz", too, where the device's clock can be read.
    void add_benchmark(const std::string& name, std::function<void(benchmark::State&)> body);

    /// A line above the table and in the JSON.
    void add_context(const std::string& key, const std::string& value);

    /// A ceiling for run_workload, e.g. measure(device, copy_peak), which the context shows as
    /// "copy_peak". Nothing is measured for --list.
    Ceiling measure(Device& device, Ceiling (*peak)(Device&));

private:
    int run_on_device(Arguments& arguments);
    void add_device_context(const DeviceInfo& info, bool columns);

    std::vector<std::string> context_;
    const Device* device_ = nullptr; ///< while run() runs
    bool list_ = false;
};

} // namespace bellows::bench
