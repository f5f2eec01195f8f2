// SPDX-License-Identifier: MIT
#pragma once

// What a checkpoint's state.json says. Plain values.

#include <bellows/shape/layout.hpp>

#include <cstdint>
#include <map>
#include <string>

namespace bellows {

/// What state.json says beside its list of files.
struct CheckpointState {
    std::uint64_t step = 0; ///< steps done
    std::uint64_t seed = 0;
    RunLayout layout;
    std::map<std::string, std::string> kernels; ///< choices that decide bits: gemm → its class
};

/// What state.json says about another file.
struct CheckpointFile {
    std::uint64_t bytes = 0;
    std::uint32_t checksum = 0; ///< CRC-32 of a shard's header, of any other file's content
};

} // namespace bellows
