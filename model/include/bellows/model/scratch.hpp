// SPDX-License-Identifier: MIT
#pragma once

// Memory that a node needs only while it runs: one arena serves all layers and slots of a stage.

#include <bellows/engine/arena.hpp>

namespace bellows {

using Scratch = Arena;

} // namespace bellows
