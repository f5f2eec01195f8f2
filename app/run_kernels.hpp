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

/// In the environment, for FP8 products:
///   usual      (default) the fastest variant of the numeric class that suits the device; what a
///              run had that goes on
///   measured   the fastest variant, whatever its bits
///   or a choice as fp8::describe() writes it, e.g. "decoded"
inline constexpr const char* kFp8VariantsVariable = "BELLOWS_FP8_VARIANTS";

/// For a Trainer with this device; `before`: the run goes on from there. Rank 0 may have to measure
/// first, on a device of its own; CPUs are not measured for a run. on_progress: of that.
KernelChoice
choose_kernels(const Device& device, const RunConfig& config,
               const std::optional<Checkpoint>& before, bool leads,
               std::function<void(std::uint64_t done, std::uint64_t total)> on_progress);

/// What the checkpoint says about FP8 products, unless the environment wants otherwise, for a
/// device that reads its weights; Decoded where it cannot compute that.
fp8::Choice products_of(const Checkpoint& checkpoint, Device& device);

} // namespace bellows
