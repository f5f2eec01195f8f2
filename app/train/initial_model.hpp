// SPDX-License-Identifier: MIT
#pragma once

// Runs whose first weights are those of a Hugging Face folder.

#include "app/command_line.hpp"
#include "app/commands.hpp"

namespace bellows {

/// Whether they have the same tensors and compute the same from them.
bool computes_alike(const ModelConfig& a, const ModelConfig& b);

/// The model of --init; of --config the [train] table, and what of [model] only training uses.
/// Throws Error{InvalidArgument} where the two have other shapes, and what HfFolder throws.
void take_initial_model(const TrainFlags& flags, TrainOptions& options);

} // namespace bellows
