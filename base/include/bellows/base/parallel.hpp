// SPDX-License-Identifier: MIT
#pragma once

// Jobs for all cores. Any thread may call.

#include <cstddef>
#include <functional>

namespace bellows {

/// Calls job(i) once for each i of [0, count), in ascending order, from as many threads as there
/// are cores, 16 at most, as the ranks of a host do this at once; the caller's is one of them.
/// Once a job has thrown no other begins, and the first error is thrown when all have ended.
void parallel_for(std::size_t count, const std::function<void(std::size_t)>& job);

} // namespace bellows
