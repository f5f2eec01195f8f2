// SPDX-License-Identifier: MIT
#pragma once

// How much device memory a rank of a training run will take, worked out from the configuration
// before anything is allocated, so that a run that cannot fit is refused at once. Pure functions.

#include <bellows/base/memory_sizes.hpp>
#include <bellows/comm/topology.hpp>
#include <bellows/shape/layer.hpp>
#include <bellows/shape/layout.hpp>

#include <cstdint>
#include <string>

namespace bellows {

struct MemoryEstimate {
    MemorySizes bytes{};

    std::uint64_t& of(MemoryCategory category) noexcept {
        return bytes[static_cast<std::size_t>(category)];
    }
    std::uint64_t total() const noexcept;
    MemoryCategory largest() const noexcept;
};

/// What computing takes on the run's devices beside the model's tensors.
struct ComputeMemory {
    bool tiles = false;  ///< FP8 products may pack their operands into tiles (fp8::Variant::Packed)
    bool copies = false; ///< products want weights once more: bf16 ones transposed, FP8 ones packed
    bool apart = false;  ///< weight gradients have scratch of their own (LayerScratch)
    bool experts_apart = false; ///< those of experts, too (WeightGradientScratch)
    bool linked = true;         ///< devices of a node may be linked, which takes larger chunks
};

/// Of the rank among those of a rank of the pipeline that holds most, from what each kind of layer
/// declares. Rows at the experts are
/// counted for a router that sends a rank a quarter more than its even share; what a badly balanced
/// one sends comes on top.
MemoryEstimate estimate_memory(const ModelConfig& model, const TrainingShape& shape,
                               const RunLayout& layout, const Topology& topology,
                               std::uint64_t rank, const ComputeMemory& compute = {},
                               LayerTable kinds = layer_kinds());
/// The same on one node.
MemoryEstimate estimate_memory(const ModelConfig& model, const TrainingShape& shape,
                               const RunLayout& layout, std::uint64_t rank,
                               const ComputeMemory& compute = {}, LayerTable kinds = layer_kinds());

/// Throws Error{InvalidArgument} if one of `sharing` ranks on a device of `device_bytes` finds no
/// room for the estimate; names the largest category and what would make it smaller.
void require_memory(const MemoryEstimate& estimate, std::uint64_t device_bytes,
                    std::uint64_t sharing, const std::string& device);

} // namespace bellows
