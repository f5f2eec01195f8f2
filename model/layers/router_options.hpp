// SPDX-License-Identifier: MIT
#pragma once

// How a model's router chooses experts, as the engine's op takes it. Used by the layers' own .cpp
// files.

#include <bellows/engine/router.hpp>
#include <bellows/shape/config.hpp>

namespace bellows {

ops::RouterOptions router_options(const ModelConfig& config);

} // namespace bellows
