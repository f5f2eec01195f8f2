// SPDX-License-Identifier: MIT
#include "ranks/ranks.hpp"

#include "app/exit_code.hpp"
#include "app/relaunch.hpp"
#include "support/common_options.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/launch.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace bellows::bench {

namespace {

World make_world(const RanksToRun& job) {
    WorldOptions world;
    world.ranks_per_node = job.ranks_per_node;
    if (!is_launched())
        return World::single(world);
    int argc = 0;
    char** argv = nullptr;
    return World::init(argc, argv, world);
}

/// What one rank does; what a rank fails with ends all.
std::string run_rank(const RanksToRun& job) {
    World world = make_world(job);
    std::string wrong;
    try {
        if (static_cast<std::uint64_t>(world.size()) != job.ranks)
            throw Error(ErrorCode::InvalidArgument, "--ranks " + std::to_string(job.ranks) +
                                                        " among " + std::to_string(world.size()) +
                                                        " ranks that have been started");
        wrong = job.body(world);
    } catch (const Error& error) {
        if (world.size() == 1)
            throw;
        world.control().abort(error);
        if (const auto cause = world.control().failure())
            throw Error(*cause);
        throw;
    }
    world.close();
    return wrong;
}

int run(const char* help, int argc, char** argv,
        const std::function<RanksToRun(int argc, char** argv)>& take, std::string& message) {
    const auto wants_help = [](std::string_view word) { return word == "--help" || word == "-h"; };
    if (std::any_of(argv + 1, argv + argc, wants_help)) {
        if (launched_rank() <= 0)
            std::printf("%s%s", help, kCommonOptionsHelp);
        return kExitGood;
    }
    const RanksToRun job = take(argc, argv);
    if (!is_launched() && job.ranks > 1) {
        const LaunchResult result =
            relaunch(static_cast<int>(job.ranks), std::vector<std::string>(argv + 1, argv + argc));
        if (result.exit_code != 0)
            message = reason_of(result);
        return result.exit_code;
    }
    message = run_rank(job);
    return message.empty() ? kExitGood : kExitWrongResult;
}

} // namespace

int run_ranks(const char* program, const char* help, int argc, char** argv,
              const std::function<RanksToRun(int argc, char** argv)>& take) {
    int code = kExitGood;
    std::string message;
    try {
        code = run(help, argc, argv, take, message);
    } catch (const Error& error) {
        code = exit_code_of(error.code());
        message = error.message();
    } catch (const std::exception& error) {
        code = kExitWrongResult;
        message = error.what();
    }
    std::fflush(stdout);
    // The process that started the ranks tells, else the first of them.
    if (code != 0 && !has_launcher() && launched_rank() <= 0)
        std::fprintf(stderr, "%s: %s\n", program, message.c_str());
    if (is_launched())
        report_exit(launched_rank(), code, message);
    return code;
}

} // namespace bellows::bench
