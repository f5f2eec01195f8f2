// SPDX-License-Identifier: MIT
#include "app/relaunch.hpp"

#include "app/exit_code.hpp"
#include "app/stop_signal.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <thread>

namespace bellows {

LaunchResult relaunch(int ranks, const std::vector<std::string>& arguments, bool can_stop,
                      bool outlive) {
    const unsigned cores = std::max(std::thread::hardware_concurrency(), 1u);
    const unsigned threads = std::max(cores / static_cast<unsigned>(ranks), 1u);
    ::setenv("LP_NUM_THREADS", std::to_string(threads).c_str(), 0);
    LaunchOptions launch;
    launch.ranks = ranks;
    if (can_stop) {
        launch.stop_signal = SIGUSR1;
        launch.stopped_exit_code = kExitStopped;
        launch.on_stop_asked = announce_stop;
    }
    if (outlive)
        launch.grace = launch.together_timeout = std::chrono::hours(24 * 30);
    launch.command = {std::filesystem::read_symlink("/proc/self/exe").string()};
    launch.command.insert(launch.command.end(), arguments.begin(), arguments.end());
    return launch_ranks(launch);
}

std::string reason_of(const LaunchResult& result) {
    return !result.reason.empty() ? result.reason
                                  : "rank " + std::to_string(result.rank) + " ended with code " +
                                        std::to_string(result.exit_code);
}

} // namespace bellows
