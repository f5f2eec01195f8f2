// SPDX-License-Identifier: MIT
#pragma once

// Writes a model as a Hugging Face folder: config.json, generation_config.json, safetensors in
// shards with an index, and the tokenizer's files. Host only.

#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/checkpoint/hf_folder.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace bellows {

/// AsStored: every tensor keeps its type and bytes. Fp8: linear layers in blocks of 128 x 128 with
/// f32 scales, codes that are there already stay, all else is bf16. With Bf16 and Fp8 router biases
/// are f32.
enum class ExportType : std::uint8_t { AsStored, Bf16, F32, Fp8 };

/// "bf16", "f32" or "fp8". Throws Error{InvalidArgument}.
ExportType parse_export_type(std::string_view text);

struct ExportOptions {
    ExportType type = ExportType::AsStored;
    std::uint64_t shard_bytes = 5'000'000'000; ///< of tensors in a file, unless one has more
    /// Bytes written so far and in total. Called from several threads, one at a time.
    std::function<void(std::uint64_t done, std::uint64_t total)> on_progress{};
};

struct ExportReport {
    std::uint64_t tensors = 0, bytes = 0, files = 0; ///< files: of tensors
};

/// Of a folder, with its tokenizer's files. Modules that predict further tokens are left out.
/// `out` must not be there, or be an empty folder; it appears when it is complete. Throws
/// Error{InvalidArgument}, Error{Io} (a full disk, say), Error{Corrupt} as HfFolder does; nothing
/// is left then.
ExportReport export_model(const HfFolder& source, const std::filesystem::path& out,
                          const ExportOptions& options);

/// Of a checkpoint of a run with this model, whose tensors' check sums are compared first. Its
/// tensors are f32. texts: further files, name → content. Throws the same, and as
/// hf_model_type() does.
ExportReport export_model(const Checkpoint& source, const ModelConfig& model, HfOutput output,
                          const std::map<std::string, std::string>& texts,
                          const std::filesystem::path& out, const ExportOptions& options);

} // namespace bellows
