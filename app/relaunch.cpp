// SPDX-License-Identifier: MIT
#include "app/relaunch.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>

namespace bellows {

LaunchResult relaunch(int ranks, const std::vector<std::string>& arguments) {
    const unsigned cores = std::max(std::thread::hardware_concurrency(), 1u);
    const unsigned threads = std::max(cores / static_cast<unsigned>(ranks), 1u);
    ::setenv("LP_NUM_THREADS", std::to_string(threads).c_str(), 0);
    LaunchOptions launch;
    launch.ranks = ranks;
    launch.command = {std::filesystem::read_symlink("/proc/self/exe").string()};
    launch.command.insert(launch.command.end(), arguments.begin(), arguments.end());
    return launch_ranks(launch);
}

LaunchResult relaunch(int ranks, int argc, const char* const* argv) {
    return relaunch(ranks, std::vector<std::string>(argv + 1, argv + argc));
}

std::string reason_of(const LaunchResult& result) {
    return !result.reason.empty() ? result.reason
                                  : "rank " + std::to_string(result.rank) + " ended with code " +
                                        std::to_string(result.exit_code);
}

} // namespace bellows
