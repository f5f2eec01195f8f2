// SPDX-License-Identifier: MIT
#pragma once

// Google Benchmark's JSON with the build type of this program. By itself it has that of Google
// Benchmark's library, which is a debug build on Debian.

#include <benchmark/benchmark.h>

#include <string>

namespace bellows::bench {

class JsonFile : public benchmark::JSONReporter {
public:
    bool ReportContext(const Context& context) override;
};

/// "Release", as CMake was told.
std::string build_type();

/// Adds what a reader of the JSON needs of the build: versions, compiler, build type.
void add_build_context();

} // namespace bellows::bench
