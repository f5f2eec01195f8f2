// SPDX-License-Identifier: MIT
#pragma once

// How a run computes its products: as its checkpoint says, as the environment wants, or as rank 0
// has measured.

#include "app/checkpoint.hpp"
#include "app/kernel_choice.hpp"

#include <cstdint>
#include <functional>
#include <optional>

namespace bellows {

/// For a Trainer with this device; `before`: the run goes on from there. Rank 0 may have to measure
/// first, on a device of its own; CPUs are not measured for a run. on_progress: of that.
KernelChoice
choose_kernels(const Device& device, const RunConfig& config,
               const std::optional<Checkpoint>& before, bool leads,
               std::function<void(std::uint64_t done, std::uint64_t total)> on_progress);

/// The variants that the environment names, and nothing else.
KernelChoice named_kernels(const TrainConfig& config);

/// Whether the run is to have copies of weights for its products, transposed or packed, as far as
/// this device can tell before the ranks agree.
bool wants_copies_of_weights(Device& device, const RunConfig& config,
                             const std::optional<Checkpoint>& before);

/// What the checkpoint of a run with this configuration says about the products of linear layers,
/// unless the environment wants otherwise, for a device that reads its weights; Decoded where it
/// cannot compute that.
fp8::Choice products_of(const Checkpoint& checkpoint, const TrainConfig& config, Device& device);

} // namespace bellows
