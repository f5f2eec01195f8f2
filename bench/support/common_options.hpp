// SPDX-License-Identifier: MIT
#pragma once

// The options that every benchmark program has. Plain values.

#include <cstdint>
#include <optional>
#include <string>

namespace bellows::bench {

class Arguments;

struct CommonOptions {
    std::optional<std::string> device, filter, json;
    std::optional<std::uint64_t> repeats; ///< at least so many timed repeats of each

    /// Whether a row of that name is wanted: all without --filter.
    bool wants(const std::string& name) const;
};

/// Their part of --help, in 80 columns.
extern const char* const kCommonOptionsHelp;

/// Throws Error{InvalidArgument} for values that do not fit, also for a filter that is no regular
/// expression.
CommonOptions take_common_options(Arguments& arguments);

} // namespace bellows::bench
