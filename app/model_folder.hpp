// SPDX-License-Identifier: MIT
#pragma once

// Hugging Face folders as the command's subcommands take them.

#include "app/command_line.hpp"
#include "app/progress.hpp"

#include <bellows/checkpoint/hf_export.hpp>
#include <bellows/checkpoint/hf_folder.hpp>

#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>

namespace bellows {

/// Shows how far the weights of a folder are read: for progress of `total` elements.
class ReadingProgress {
public:
    /// bytes: of the folder. The reporter must outlive this.
    ReadingProgress(ProgressReporter& progress, std::uint64_t bytes)
        : progress_(&progress), bytes_(bytes), start_(std::chrono::steady_clock::now()) {}
    void operator()(std::uint64_t done, std::uint64_t total) const;

private:
    ProgressReporter* progress_;
    std::uint64_t bytes_;
    std::chrono::steady_clock::time_point start_;
};

/// Gives the value of `tokenizer` in [train] that names the folder's tokenizer. This is "bytes" for
/// a folder without a tokenizer whose model has a vocabulary of bytes. Throws
/// Error{InvalidArgument} for another folder without one.
std::string folder_tokenizer(const HfFolder& folder);

/// Gives fp8 where most bytes are FP8 codes, f32 where they are f32, else bf16.
Precision usual_precision(const HfFolder& folder);

/// "64 routed experts, top 6, 2 shared", or "no experts".
std::string describe_experts(const ModelConfig& model);

/// Gives the part of `bellows info --model --json` that follows from the model's shape alone.
nlohmann::ordered_json shape_report(const ModelConfig& model);

/// `bellows info --model` of such a folder, on standard output.
int print_folder_info(const std::filesystem::path& folder, bool json);

/// Checks the flags of `bellows export`, and runs it.
int run_export(const ExportFlags& flags);

/// "5GB", "512MiB" or bytes alone; of at least 1 MB. Throws Error{InvalidArgument}.
std::uint64_t parse_size(const std::string& text);

} // namespace bellows
