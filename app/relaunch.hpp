// SPDX-License-Identifier: MIT
#pragma once

// This very program again, once per rank of a run on this host.

#include <bellows/comm/launch.hpp>

#include <string>
#include <vector>

namespace bellows {

/// arguments: without the program's name. The ranks share the cores: a software Vulkan driver of
/// each gets its part, unless LP_NUM_THREADS says otherwise. can_stop: the ranks
/// watch_stop_signals(), so that a first signal asks them to stop. outlive: where a rank is lost,
/// the others have all the time that they need. Throws as launch_ranks() does.
LaunchResult relaunch(int ranks, const std::vector<std::string>& arguments, bool can_stop = false,
                      bool outlive = false);

/// Of one that has failed: what it says, or which rank ended how.
std::string reason_of(const LaunchResult& result);

} // namespace bellows
