// SPDX-License-Identifier: MIT
#pragma once

// Hugging Face folders as the command's subcommands take them.

#include "app/command_line.hpp"
#include "app/progress.hpp"

#include <bellows/checkpoint/hf_export.hpp>
#include <bellows/checkpoint/hf_folder.hpp>

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

/// What tokenizer = "..." in [train] says for the tokenizer of such a folder. Of a folder without
/// one, whose model has a vocabulary of bytes: "bytes". Throws Error{InvalidArgument} if there is
/// none that this program reads.
std::string folder_tokenizer(const HfFolder& folder);

/// Of FP8 codes fp8, of f32 f32, of all else bf16.
Precision usual_precision(const HfFolder& folder);

/// "64 routed experts, top 6, 2 shared", or "no experts".
std::string describe_experts(const ModelConfig& model);

/// `bellows info --model` of such a folder, on standard output.
int print_folder_info(const std::filesystem::path& folder, bool json);

/// Checks the flags of `bellows export`, and runs it.
int run_export(const ExportFlags& flags);

/// "5GB", "512MiB" or bytes alone; of at least 1 MB. Throws Error{InvalidArgument}.
std::uint64_t parse_size(const std::string& text);

} // namespace bellows
