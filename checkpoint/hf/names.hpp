// SPDX-License-Identifier: MIT
#pragma once

// Which tensors of a Hugging Face folder hold a parameter. There a gate's matrix and an up
// projection's are apart, or the matrices of all experts are one tensor; and Llama and Qwen3 rotate
// element i of a head with element i + d / 2, where the engine rotates neighbours, so that the rows
// of query and key projections stand in another order. Pure functions.

#include <bellows/shape/config.hpp>
#include <bellows/shape/parameters.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {

/// Rows of a tensor: of a gain or bias its elements; of [experts, rows, columns] those of all
/// experts one after the other.
struct HfPart {
    std::string tensor;
    std::vector<std::uint64_t> shape; ///< of the whole tensor
    std::uint64_t first_row = 0, rows = 0;
};

/// The parts that a parameter's rows come from, in the order of its rows.
std::vector<HfPart> parts_of(const ParameterInfo& info);

/// The name of the tensor with all experts' matrices `matrix` ("gate_up_proj" or "down_proj").
std::string fused_experts_name(std::uint64_t layer, const std::string& matrix);
/// An expert's parameter in it.
HfPart fused_part_of(const ModelConfig& config, const ParameterInfo& info);

/// How many rows of the parameter belong to one head whose rows stand in another order there; 0:
/// all stand alike.
std::uint64_t reordered_rows(const ModelConfig& config, const ParameterInfo& info);

/// Where row `row` of a parameter stands there. head: reordered_rows().
constexpr std::uint64_t row_there(std::uint64_t row, std::uint64_t head) noexcept {
    const std::uint64_t within = row % head;
    return row - within + within / 2 + (within % 2) * (head / 2);
}

/// The name of the scales of an FP8 tensor.
std::string scales_name(const std::string& tensor);

} // namespace bellows
