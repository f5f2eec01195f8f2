// SPDX-License-Identifier: MIT
#pragma once

// How a config.json says that rotary angles are stretched.

#include "config_keys.hpp"

#include <bellows/shape/config.hpp>

namespace bellows {

/// Takes rope_theta with rope_scaling, or rope_parameters, and sets the rope fields of `model`,
/// whose attention and max_context are known. Throws Error{InvalidArgument} naming the key.
void read_rope(ConfigKeys& keys, ModelConfig& model);

/// The value of the key rope_scaling; null without stretching.
nlohmann::ordered_json format_rope_scaling(const ModelConfig& model);

} // namespace bellows
