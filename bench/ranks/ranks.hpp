// SPDX-License-Identifier: MIT
#pragma once

// A benchmark whose work is that of several ranks: the program starts itself once per rank, unless
// mpirun or srun has, and ends with one exit code: 0 all right, 1 a wrong result, 2 bad usage, 3 no
// device or MPI that serves, 4 a lost rank.

#include <bellows/comm/world.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace bellows::bench {

struct RanksToRun {
    std::uint64_t ranks = 1; ///< started where none are; else there must be as many
    std::optional<int> ranks_per_node{};
    /// On each rank; "" or what is wrong, the same on all.
    std::function<std::string(World& world)> body;
};

/// main(). help: for --help and -h. take: from the arguments; throws Error{InvalidArgument}.
int run_ranks(const char* program, const char* help, int argc, char** argv,
              const std::function<RanksToRun(int argc, char** argv)>& take);

/// The same where options say but how many ranks there are (`ranks`).
template <class Options>
int run_ranks(const char* program, const char* help, int argc, char** argv,
              Options (*take)(int argc, char** argv),
              std::string (*body)(World& world, const Options& options)) {
    return run_ranks(program, help, argc, argv, [=](int count, char** words) {
        const Options options = take(count, words);
        return RanksToRun{options.ranks, {}, [=](World& world) { return body(world, options); }};
    });
}

} // namespace bellows::bench
