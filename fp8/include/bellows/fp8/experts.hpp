// SPDX-License-Identifier: MIT
#pragma once

// A layer's experts, shared ones among them, for few rows: two dispatches from a router's choice to
// results, by a device's own code (Variant::Native). Memory is read once; what multiplies costs
// nothing beside it. The thread that owns the recording calls these; errors are
// Error{InvalidArgument} with all shapes, and nothing is recorded then.

#include <bellows/fp8/gemm.hpp>

#include <optional>
#include <string>

namespace bellows::fp8 {

/// E4M3 in 128x128 blocks. gate_up: [experts, 2 * ffn, hidden], gate first; down: [experts, hidden,
/// ffn]. Shared experts are one of shared * ffn columns: [2 * shared * ffn, hidden] and [hidden,
/// shared * ffn]. ffn is a multiple of 128.
struct ExpertWeights {
    Quantized gate_up, down;
    std::optional<Quantized> shared_gate_up, shared_down; ///< both or none

    std::uint32_t experts() const { return static_cast<std::uint32_t>(down.codes.extent[0]); }
    std::uint64_t hidden() const { return down.codes.extent[1]; }
    std::uint64_t ffn() const { return down.codes.extent[2]; }
    /// Shared experts of ffn columns each.
    std::uint32_t shared() const;
};

/// "" when the device takes these weights for so many slots (rows of ids times their columns), else
/// what is against it.
std::string why_not_experts(const Device& device, const ExpertWeights& weights,
                            std::uint64_t slots);

/// Row s of `hidden` = silu(gate) * up of x[s / ids' columns] and expert ids[s]. x: [tokens,
/// hidden] in 1x128 blocks; ids: [tokens, columns] i32, the shared experts' numbers being those
/// from `experts` on; hidden: [slots, ffn] in 1x128 blocks. Gate and up are rounded to bf16 before
/// (rounded: false: not), so that codes have the bits of a product, of which `hidden` was
/// quantised. Slots of rows from ids.row_count on, and those with other ids, are left alone.
void experts_hidden(Recording& recording, const Quantized& x, const ExpertWeights& weights,
                    const TensorView& ids, const Quantized& hidden, bool rounded = true);
/// Row s of `results` = row s of `hidden` times expert ids[s]'s down. results: [slots, hidden] f32
/// or bf16.
void experts_results(Recording& recording, const Quantized& hidden, const ExpertWeights& weights,
                     const TensorView& ids, const TensorView& results);

} // namespace bellows::fp8
