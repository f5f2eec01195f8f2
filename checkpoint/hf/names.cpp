// SPDX-License-Identifier: MIT
#include "names.hpp"

#include <bellows/base/error.hpp>
#include <bellows/shape/sharded_ranges.hpp>

namespace bellows {

namespace {

constexpr std::string_view kFused = "gate_up_proj.weight";

bool is_fused(const ParameterInfo& info) {
    return info.name.ends_with(kFused);
}

} // namespace

std::vector<HfPart> parts_of(const ParameterInfo& info) {
    const std::uint64_t rows = info.shape.front();
    if (!is_fused(info))
        return {{info.name, info.shape, 0, rows}};
    const std::string prefix = info.name.substr(0, info.name.size() - kFused.size());
    const std::vector<std::uint64_t> shape = {rows / 2, info.shape.at(1)};
    return {{prefix + "gate_proj.weight", shape, 0, rows / 2},
            {prefix + "up_proj.weight", shape, 0, rows / 2}};
}

std::string fused_experts_name(std::uint64_t layer, const std::string& matrix) {
    return "model.layers." + std::to_string(layer) + ".mlp.experts." + matrix;
}

HfPart fused_part_of(const ModelConfig& config, const ParameterInfo& info) {
    if (info.kind != ParameterKind::Expert)
        throw Error(ErrorCode::Internal, info.name + " is not of an expert");
    const std::uint64_t rows = info.shape[0];
    return {fused_experts_name(static_cast<std::uint64_t>(info.layer), matrix_of(info)),
            {config.routed_experts, rows, info.shape[1]},
            static_cast<std::uint64_t>(info.expert) * rows,
            rows};
}

std::uint64_t reordered_rows(const ModelConfig& config, const ParameterInfo& info) {
    if (config.is_mla())
        return 0; // DeepSeek rotates neighbours, too
    for (const char* name : {"q_proj", "k_proj", "q_norm", "k_norm"})
        if (info.name.ends_with(std::string(".self_attn.") + name + ".weight"))
            return config.head_dim;
    return 0;
}

std::string scales_name(const std::string& tensor) {
    return tensor + "_scale_inv";
}

} // namespace bellows
