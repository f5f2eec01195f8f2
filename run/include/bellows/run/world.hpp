// SPDX-License-Identifier: MIT
#pragma once

// This process as one of the ranks of a run.

#include <bellows/comm/world.hpp>

#include <functional>

namespace bellows {

/// Runs `body` in a world of the ranks that mpirun or srun started, or of this one alone. What it
/// throws ends the job: every rank throws the error that was first, with the rank it is about.
int in_world(const std::function<int(World&)>& body);

} // namespace bellows
