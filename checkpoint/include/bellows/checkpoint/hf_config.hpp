// SPDX-License-Identifier: MIT
#pragma once

// The config.json of a Hugging Face folder as a ModelConfig, and back. Keys that change what a
// model computes and that Bellows does not know are refused by name. Pure functions but for
// load_hf_config(); any thread.

#include <bellows/shape/config.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

inline constexpr const char* kHfConfigFile = "config.json";
inline constexpr const char* kHfGenerationFile = "generation_config.json";

/// The key model_type. A deepseek_v3 also goes by the name kimi_k2.
enum class HfModelType : std::uint8_t { DeepseekV2, DeepseekV3, Llama, Qwen3, Qwen3Moe };

/// E.g. "deepseek_v3".
const char* to_string(HfModelType type) noexcept;

struct HfConfig {
    HfModelType type = HfModelType::Llama;
    ModelConfig model;
    std::string dtype;                ///< what the file calls it, e.g. "bfloat16"; "": it does not
    bool fp8 = false;                 ///< weights are FP8 codes with scales of 128 x 128 blocks
    std::uint64_t mtp_modules = 0;    ///< layers behind the last that predict further tokens
    std::optional<std::uint64_t> bos; ///< token ids
    std::vector<std::uint64_t> eos;
    std::vector<std::string> read{};    ///< keys that were understood, sorted
    std::vector<std::string> ignored{}; ///< keys that change nothing here, sorted
};

/// Reads and validates. `source` names the text in errors. Absent keys have the defaults of the
/// classes of transformers. Throws Error{Corrupt} where the text is no JSON object or has a key
/// twice, Error{InvalidArgument} that names the key for a value that is not supported and for a key
/// that is not known.
HfConfig parse_hf_config(std::string_view text, std::string_view source);

/// config.json of a folder, of at most 1 MiB. Throws Error{Io} if it cannot be read, and what
/// parse_hf_config() throws.
HfConfig load_hf_config(const std::filesystem::path& folder);

/// The ids at which a text ends: those of config.json and of generation_config.json, if there is
/// one. Throws as load_hf_config() does.
std::vector<std::uint64_t> end_tokens(const std::filesystem::path& folder, const HfConfig& config);

/// The architecture that computes this model. Throws Error{InvalidArgument} that says what no
/// architecture has.
HfModelType hf_model_type(const ModelConfig& model);

/// What a configuration says beside the model's shape.
struct HfOutput {
    std::string dtype = "bfloat16"; ///< of what is not FP8
    bool fp8 = false;
    std::uint64_t max_context = 0; ///< where the model does not say it
    std::optional<std::uint64_t> bos{};
    std::vector<std::uint64_t> eos{};
};

/// The text of config.json, which parse_hf_config() reads back to an equal model, but for what only
/// training uses. Throws as hf_model_type() does.
std::string format_hf_config(const ModelConfig& model, const HfOutput& output);
/// The text of generation_config.json.
std::string format_hf_generation_config(const HfOutput& output);

} // namespace bellows
