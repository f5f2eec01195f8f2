// SPDX-License-Identifier: MIT
#include "support/common_options.hpp"

#include "support/program.hpp"

#include <bellows/base/error.hpp>

#include <regex>

namespace bellows::bench {

const char* const kCommonOptionsHelp = R"(
Options of all benchmarks:
  --device D        where to run: INDEX, UUID, gpu, cpu or any (default: the
                    device that BELLOWS_DEVICE names, else any); programs of
                    several ranks take a list such as 0,1 in turn
  --filter REGEX    time only rows whose name matches
  --repeats N       time each row at least N times; the tables show the median,
                    and the least and the largest time (min-max)
  --json FILE       write the results there, too
  --help            show this text
)";

bool CommonOptions::wants(const std::string& name) const {
    return !filter || std::regex_search(name, std::regex(*filter, std::regex::extended));
}

CommonOptions take_common_options(Arguments& arguments) {
    constexpr std::uint64_t kMostRepeats = 1 << 16;
    CommonOptions options;
    options.device = arguments.value("--device");
    options.filter = arguments.value("--filter");
    options.json = arguments.value("--json");
    if (const auto repeats = arguments.number("--repeats", 0, 1, kMostRepeats); repeats > 0)
        options.repeats = repeats;
    try {
        (void)options.wants("");
    } catch (const std::regex_error&) {
        throw Error(ErrorCode::InvalidArgument,
                    "--filter " + *options.filter + " is no regular expression");
    }
    return options;
}

} // namespace bellows::bench
