// SPDX-License-Identifier: MIT
#pragma once

// The folders that make_hf_models.py has made.

#include <filesystem>
#include <string>
#include <vector>

namespace bellows::testing {

inline std::filesystem::path hf_model(const std::string& name) {
    return std::filesystem::path(BELLOWS_HF_MODELS) / name;
}

inline std::vector<std::string> hf_models() {
    return {"v2-lite",        "v2",       "v3",    "v3-mtp",
            "moonlight",      "v3-fp8",   "llama", "llama3-tied",
            "odd-vocabulary", "odd-tied", "qwen3", "qwen3-moe"};
}

} // namespace bellows::testing
