// SPDX-License-Identifier: MIT
#include "declare.hpp"

#include <utility>

namespace bellows::declare {

std::string prefix_of(std::uint64_t layer) {
    return "model.layers." + std::to_string(layer) + ".";
}

ParameterInfo matrix(const ModelConfig& config, std::string name, std::vector<std::uint64_t> shape,
                     ParameterKind kind, std::int64_t layer, std::int64_t expert) {
    return {std::move(name), std::move(shape), kind, layer, expert, 0, config.init_std, true};
}

ParameterInfo gain(std::string name, std::uint64_t size, std::int64_t layer) {
    return {std::move(name), {size}, ParameterKind::Norm, layer, -1, 1, 0, false};
}

void add_ffn(std::vector<ParameterInfo>& to, const ModelConfig& config, const std::string& prefix,
             std::uint64_t width, ParameterKind kind, std::int64_t layer, std::int64_t expert) {
    to.push_back(matrix(config, prefix + "gate_up_proj.weight", {2 * width, config.hidden}, kind,
                        layer, expert));
    to.push_back(
        matrix(config, prefix + "down_proj.weight", {config.hidden, width}, kind, layer, expert));
}

BufferInfo plain(std::string name, DType dtype, std::vector<std::uint64_t> extents,
                 MemoryCategory category) {
    return {.name = std::move(name),
            .dtype = dtype,
            .extents = std::move(extents),
            .category = category};
}

BufferInfo linear_input(const SlotShape& shape, std::string name, std::uint64_t rows,
                        std::uint64_t columns) {
    BufferInfo info = plain(std::move(name), shape.activation, {rows, columns});
    if (shape.fp8())
        info.storage = Storage::Fp8Rows;
    return info;
}

BufferInfo linear_gradient(std::string name, const SlotShape& shape, std::uint64_t rows,
                           std::uint64_t columns) {
    BufferInfo info =
        plain(std::move(name), shape.activation, {rows, columns}, MemoryCategory::DeferredWgrad);
    info.storage = Storage::Fp8Columns;
    return info;
}

void add_swiglu(std::vector<BufferInfo>& to, const SlotShape& shape, const std::string& prefix,
                std::uint64_t ffn, RowCount rows) {
    const bool of_experts = rows != RowCount::Fixed;
    const std::uint64_t most = of_experts ? shape.expert_rows : shape.tokens;
    const auto add = [&](BufferInfo info) {
        info.rows = rows;
        to.push_back(std::move(info));
    };
    add(linear_input(shape, prefix + "gate and up", most, 2 * ffn));
    if (!shape.fp8()) {
        add(plain(prefix + "inner", shape.activation, {most, ffn}));
    } else if (shape.training && (!of_experts || shape.local_experts > 0)) {
        BufferInfo gradient =
            linear_gradient(prefix + "gate and up gradient", shape, most, 2 * ffn);
        gradient.groups = of_experts ? shape.local_experts : 0;
        add(std::move(gradient));
    }
}

std::uint64_t quantized_bytes(std::uint64_t rows, std::uint64_t columns) {
    return fp8::quantized_bytes(kRowsRecipe, {rows, columns});
}

namespace {

/// Rows of operands of a product of as many matrices, which may fill up tiles.
std::uint64_t filled_rows(const SlotShape& shape, std::uint64_t rows, std::uint64_t matrices) {
    return rows + (shape.packs_operands ? 128 * matrices : 0);
}

/// Of an element of a weight that a product decodes.
std::uint64_t weight_bytes(const SlotShape& shape) {
    return shape.f32_scales ? 4 : 2;
}

} // namespace

std::uint64_t fp8_ffn_scratch(const ModelConfig& config, const SlotShape& shape, std::uint64_t rows,
                              std::uint64_t ffn, std::uint64_t matrices) {
    // The SwiGLU's gradient in both forms, then a product's operands.
    return rows * 2 * ffn * size_of(shape.activation) + quantized_bytes(rows, 2 * ffn) +
           filled_rows(shape, rows, matrices) * 2 * ffn * 2 +
           (shape.weights_packed ? 0 : matrices * 2 * ffn * config.hidden * weight_bytes(shape));
}

std::uint64_t fp8_ffn_weight_gradient_scratch(const ModelConfig& config, const SlotShape& shape,
                                              std::uint64_t rows, std::uint64_t ffn,
                                              std::uint64_t matrices) {
    // The input and the SwiGLU's output quantised anew, then a product's operands. Where products
    // take the operands' values, they are quantised to these alone.
    return quantized_bytes(rows, config.hidden) + quantized_bytes(rows, ffn) +
           filled_rows(shape, rows, matrices) * (2 * ffn + config.hidden) * 2;
}

std::vector<NodeInfo> attention_nodes(const SlotShape& shape, std::uint64_t forward_scratch,
                                      std::uint64_t input_gradient_scratch,
                                      std::uint64_t weight_gradient_scratch) {
    std::vector<NodeInfo> list = {
        {.name = "ATTN(F)", .kind = NodeKind::Forward, .scratch_bytes = forward_scratch}};
    if (!shape.training)
        return list;
    list.push_back({.name = "ATTN(B)",
                    .kind = NodeKind::InputGradient,
                    .scratch_bytes = input_gradient_scratch});
    list.push_back({.name = "ATTN(W)",
                    .kind = NodeKind::WeightGradient,
                    .scratch_bytes = weight_gradient_scratch});
    return list;
}

} // namespace bellows::declare
