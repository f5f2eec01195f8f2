// SPDX-License-Identifier: MIT
#include "ranks/ranks.hpp"

#include "app/exit_code.hpp"

#include <bellows/comm/launch.hpp>
#include <bellows/engine/error.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string_view>
#include <thread>

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

/// Starts this very command once per rank.
int start_ranks(std::uint64_t ranks, int argc, char** argv, std::string& message) {
    // A software Vulkan driver of each rank must not take all cores.
    const std::uint64_t cores = std::max(std::thread::hardware_concurrency(), 1u);
    ::setenv("LP_NUM_THREADS", std::to_string(std::max<std::uint64_t>(cores / ranks, 1)).c_str(),
             0);
    LaunchOptions launch;
    launch.ranks = static_cast<int>(ranks);
    launch.command = {std::filesystem::read_symlink("/proc/self/exe").string()};
    launch.command.insert(launch.command.end(), argv + 1, argv + argc);
    const LaunchResult result = launch_ranks(launch);
    if (result.exit_code != 0)
        message = !result.reason.empty()
                      ? result.reason
                      : "rank " + std::to_string(result.rank) + " ended with code " +
                            std::to_string(result.exit_code);
    return result.exit_code;
}

int run(const char* help, int argc, char** argv,
        const std::function<RanksToRun(int argc, char** argv)>& take, std::string& message) {
    const auto wants_help = [](std::string_view word) { return word == "--help" || word == "-h"; };
    if (std::any_of(argv + 1, argv + argc, wants_help)) {
        if (launched_rank() <= 0)
            std::fputs(help, stdout);
        return kExitGood;
    }
    const RanksToRun job = take(argc, argv);
    if (!is_launched() && job.ranks > 1)
        return start_ranks(job.ranks, argc, argv, message);
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
