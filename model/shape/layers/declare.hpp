// SPDX-License-Identifier: MIT
#pragma once

// What the declarations of several kinds of layers share.

#include <bellows/shape/layer.hpp>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace bellows {

// The kinds, each in a source of its own; the table in kinds.cpp has a row for each.
LayerKind embedding_layer() noexcept;
LayerKind mla_attention() noexcept;
LayerKind gqa_attention() noexcept;
LayerKind dense_ffn() noexcept;
LayerKind moe_ffn() noexcept;
LayerKind head_layer() noexcept;
LayerKind mtp_input() noexcept;
LayerKind mtp_head() noexcept;

namespace declare {

/// "model.layers.3."
std::string prefix_of(std::uint64_t layer);

/// layer: -1 at the front and the back.
ParameterInfo matrix(const ModelConfig& config, std::string name, std::vector<std::uint64_t> shape,
                     ParameterKind kind, std::int64_t layer, std::int64_t expert = -1);
ParameterInfo gain(std::string name, std::uint64_t size, std::int64_t layer);
/// The two matrices of a SwiGLU FFN of that width.
void add_ffn(std::vector<ParameterInfo>& to, const ModelConfig& config, const std::string& prefix,
             std::uint64_t width, ParameterKind kind, std::int64_t layer, std::int64_t expert = -1);

BufferInfo plain(std::string name, DType dtype, std::vector<std::uint64_t> extents,
                 MemoryCategory category = MemoryCategory::Activations);
/// What enters linear layers and is kept for their weight gradients: FP8 rows where these compute
/// in FP8.
BufferInfo linear_input(const SlotShape& shape, std::string name, std::uint64_t rows,
                        std::uint64_t columns);
/// In FP8 alone: a gradient that its input-gradient node keeps for the weight-gradient node.
BufferInfo linear_gradient(std::string name, const SlotShape& shape, std::uint64_t rows,
                           std::uint64_t columns);
/// What a SwiGLU keeps: its input and output; in FP8 its input and that one's gradient.
void add_swiglu(std::vector<BufferInfo>& to, const SlotShape& shape, const std::string& prefix,
                std::uint64_t ffn, RowCount rows = RowCount::Fixed);

/// ATTN(F), and for training ATTN(B) and ATTN(W), with the bytes of scratch that each needs.
std::vector<NodeInfo> attention_nodes(const SlotShape& shape, std::uint64_t forward_scratch,
                                      std::uint64_t input_gradient_scratch,
                                      std::uint64_t weight_gradient_scratch);

/// Bytes of FP8 rows or columns of that size, with their scales.
std::uint64_t quantized_bytes(std::uint64_t rows, std::uint64_t columns);
/// Scratch of an FFN's forward or input-gradient node in FP8, at most. `rows` are as many as could
/// come, of as many matrices.
std::uint64_t fp8_ffn_scratch(const ModelConfig& config, const SlotShape& shape, std::uint64_t rows,
                              std::uint64_t ffn, std::uint64_t matrices);
/// The same of its weight-gradient node.
std::uint64_t fp8_ffn_weight_gradient_scratch(const ModelConfig& config, const SlotShape& shape,
                                              std::uint64_t rows, std::uint64_t ffn,
                                              std::uint64_t matrices);

} // namespace declare
} // namespace bellows
