// SPDX-License-Identifier: MIT
#pragma once

// How a run computes its products: as its checkpoint says, as the environment wants, or as rank 0
// has measured.

#include "app/kernel_choice.hpp"

#include <cstdint>
#include <functional>
#include <optional>

namespace bellows {

/// For a Trainer with this device; `kept`: of the checkpoint from which the run goes on, or null.
/// Rank 0 may have to measure first, on a device of its own; CPUs are not measured for a run.
/// on_progress: of that.
KernelChoice
choose_kernels(const Device& device, Precision precision, const KernelNames* kept, bool leads,
               std::function<void(std::uint64_t done, std::uint64_t total)> on_progress);

/// What a checkpoint keeps of how its run computed products, so that they keep their bits, unless
/// the options name another class of bf16 products.
KernelChoice kept_kernels(const KernelNames& kept, const DeviceOptions& options);

/// The variants that the environment names, and nothing else.
KernelChoice named_kernels(Precision precision);

/// Whether the run is to have copies of weights for its products, transposed or packed, as far as
/// this device can tell before the ranks agree.
bool wants_copies_of_weights(Device& device, Precision precision, const KernelNames* kept);

/// What the checkpoint of a run in this precision says about the products of linear layers, unless
/// the environment wants otherwise, for a device that reads its weights; Decoded where it cannot
/// compute that.
fp8::Choice products_of(const KernelNames& kept, Precision precision, Device& device);

} // namespace bellows
