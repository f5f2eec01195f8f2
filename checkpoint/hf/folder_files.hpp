// SPDX-License-Identifier: MIT
#pragma once

// Which files of a Hugging Face folder hold tensors, and whether they may.

#include <filesystem>
#include <functional>
#include <map>
#include <string>

namespace bellows {

inline constexpr const char* kHfWeightsFile = "model.safetensors";
inline constexpr const char* kHfIndexFile = "model.safetensors.index.json";

/// Tensor → file.
using HfIndex = std::map<std::string, std::string, std::less<>>;

/// The path of a file of the folder. Throws Error{Io} if it is not there, Error{InvalidArgument} if
/// it is a link that leaves the folder. A snapshot in the cache of huggingface_hub may link to the
/// cache's own blobs.
std::filesystem::path file_in(const std::filesystem::path& folder, const std::string& name);

/// Reads an index of at most 100 MB. Throws Error{Corrupt}, Error{InvalidArgument} for a file that
/// has no plain name or is no safetensors file.
HfIndex read_hf_index(const std::filesystem::path& file);

/// Why a folder without safetensors holds no tensors: Error{InvalidArgument}, which says so where
/// it has pickled ones.
[[noreturn]] void refuse_folder_without_tensors(const std::filesystem::path& folder);

} // namespace bellows
