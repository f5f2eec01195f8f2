// SPDX-License-Identifier: MIT
#pragma once

// The contents of a checkpoint's state.json, as plain values.

#include <bellows/shape/expert_placement.hpp>
#include <bellows/shape/layout.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// Where experts are that training places, by layer of the model, and how often each of a layer
/// was chosen.
struct ExpertPlaces {
    std::map<std::uint64_t, ExpertPlacement> placements;
    std::map<std::uint64_t, std::vector<double>> loads; ///< of the same layers, since then
    /// The loads that they were placed by; layers that no loads have placed are left out.
    std::map<std::uint64_t, std::vector<double>> placed_by;

    bool operator==(const ExpertPlaces&) const = default;
};

/// The contents of state.json beside its list of files.
struct CheckpointState {
    std::uint64_t step = 0; ///< steps done
    std::uint64_t seed = 0;
    RunLayout layout;
    std::optional<double> loss; ///< of that step, nats per token; older versions do not say it
    std::map<std::string, std::string> kernels; ///< choices that decide bits: gemm → its class
    ExpertPlaces experts;                       ///< empty where they stay in their blocks
};

/// The entry of state.json for another file.
struct CheckpointFile {
    std::uint64_t bytes = 0;
    std::uint32_t checksum = 0; ///< CRC-32 of a shard's header, of any other file's content
};

} // namespace bellows
