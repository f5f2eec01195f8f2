// SPDX-License-Identifier: MIT
#pragma once

// The contents of a checkpoint's state.json, as plain values.

#include <bellows/shape/layout.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace bellows {

/// The contents of state.json beside its list of files.
struct CheckpointState {
    std::uint64_t step = 0; ///< steps done
    std::uint64_t seed = 0;
    RunLayout layout;
    std::optional<double> loss; ///< of that step, nats per token; older versions do not say it
    std::map<std::string, std::string> kernels; ///< choices that decide bits: gemm → its class
};

/// The entry of state.json for another file.
struct CheckpointFile {
    std::uint64_t bytes = 0;
    std::uint32_t checksum = 0; ///< CRC-32 of a shard's header, of any other file's content
};

} // namespace bellows
