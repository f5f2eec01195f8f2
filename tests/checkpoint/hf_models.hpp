// SPDX-License-Identifier: MIT
#pragma once

// The folders that make_hf_models.py has made.

#include <bellows/shape/layer.hpp>

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace bellows::testing {

inline std::filesystem::path hf_model(const std::string& name) {
    return std::filesystem::path(BELLOWS_HF_MODELS) / name;
}

/// Whether there are layers with grouped-query attention.
inline bool has_gqa() {
    return std::ranges::any_of(
        layer_kinds(), [](const LayerKind& kind) { return kind.name == std::string_view("gqa"); });
}

inline std::vector<std::string> mla_models() {
    return {"v2-lite", "v2", "v3", "moonlight", "v3-fp8"};
}
inline std::vector<std::string> gqa_models() {
    return {"llama", "llama3-tied", "qwen3", "qwen3-moe"};
}
/// Those whose forward pass there is.
inline std::vector<std::string> computed_models() {
    std::vector<std::string> names = {"v3-fp8"};
    if (has_gqa()) { // and stretched rotations, and an eps of latents' own
        names = mla_models();
        for (const std::string& name : gqa_models())
            names.push_back(name);
    }
    return names;
}
/// Those whose layers there are.
inline std::vector<std::string> hf_models() {
    std::vector<std::string> names = mla_models();
    if (has_gqa())
        for (const std::string& name : gqa_models())
            names.push_back(name);
    return names;
}

} // namespace bellows::testing
