// SPDX-License-Identifier: MIT
#pragma once

// The kernels that decide the bits of a run, and how its ranks agree on them.

#include "app/train_config.hpp"

#include <bellows/comm/host_collectives.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/fp8/choice.hpp>

#include <map>
#include <optional>
#include <string>

namespace bellows {

/// By the name of their choice:
///   gemm   numeric class of products of bf16 tensors (engine's gemm_plan.hpp)
///   fp8    variants of FP8 products (fp8's choice.hpp), where linear layers compute in FP8
struct KernelChoice {
    std::map<std::string, std::string> chosen;
    /// Of a run that goes on, or asked for: no rank may choose otherwise.
    bool binding = false;
};

struct AgreedKernels {
    std::optional<fp8::Choice> products; ///< of FP8, where linear layers compute in it
    std::string why_decoded;             ///< all of these; empty where they are not
};

/// Collective: rank 0's choice (it `leads`) serves all, as ranks that round differently would drift
/// apart. Of bf16 runs, before anything is recorded on the device, whose class of products it sets.
/// Throws Error{Unsupported} when a rank's device lacks the class, or variants of FP8 products that
/// are binding; where one lacks others, all decode (fp8::Variant::Decoded).
AgreedKernels agree_on_kernels(Device& device, HostCollectives& everyone, bool leads,
                               const TrainConfig& config, const KernelChoice& wanted);

} // namespace bellows
