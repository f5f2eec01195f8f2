// SPDX-License-Identifier: MIT
#include "folder_files.hpp"

#include "base/strict_json.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <algorithm>
#include <array>
#include <string_view>
#include <system_error>

namespace bellows {

namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kLargestIndex = 100'000'000;

bool is_below(const fs::path& path, const fs::path& folder) {
    return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first ==
           folder.end();
}

/// Empty unless the folder is <cache>/snapshots/<revision>.
fs::path blobs_of(const fs::path& folder) {
    const fs::path snapshots = folder.parent_path();
    return snapshots.filename() == "snapshots" ? snapshots.parent_path() / "blobs" : fs::path();
}

bool is_plain_name(std::string_view name) {
    constexpr std::string_view kForbidden("/\\\0", 3);
    return !name.empty() && name.front() != '.' &&
           name.find_first_of(kForbidden) == std::string_view::npos;
}

} // namespace

fs::path file_in(const fs::path& folder, const std::string& name) {
    const fs::path path = folder / name;
    std::error_code error;
    const fs::path real = fs::canonical(path, error);
    if (error)
        throw Error(ErrorCode::Io, errno_message("open", path, error.value()));
    const fs::path blobs = blobs_of(folder);
    if (!is_below(real, folder) && (blobs.empty() || !is_below(real, blobs)))
        throw Error(ErrorCode::InvalidArgument, in_quotes(path.string()) +
                                                    " is a link that leaves the folder, to " +
                                                    in_quotes(real.string()));
    return real;
}

HfIndex read_hf_index(const fs::path& file) {
    const std::string name = in_quotes(file.string());
    const nlohmann::json json = parse_strict_object(read_file(file, kLargestIndex), name);
    const auto map = json.find("weight_map");
    if (map == json.end() || !map->is_object() || map->empty())
        throw Error(ErrorCode::Corrupt, name + " has no weight_map of tensors");
    HfIndex index;
    for (const auto& [tensor, value] : map->items()) {
        if (!value.is_string())
            throw Error(ErrorCode::Corrupt,
                        name + ": tensor " + in_quotes(tensor) + " stands in no file");
        const std::string shard = value.get<std::string>();
        if (!is_plain_name(shard))
            throw Error(ErrorCode::InvalidArgument, name + ": tensor " + in_quotes(tensor) +
                                                        " stands in " + in_quotes(shard) +
                                                        ", which is no plain file name");
        if (!shard.ends_with(".safetensors"))
            throw Error(ErrorCode::InvalidArgument, name + ": tensor " + in_quotes(tensor) +
                                                        " stands in " + in_quotes(shard) +
                                                        ", which is no safetensors file");
        index[tensor] = shard;
    }
    return index;
}

void refuse_folder_without_tensors(const fs::path& folder) {
    constexpr std::array<std::string_view, 5> kPickled = {".bin", ".pt", ".pth", ".ckpt", ".pkl"};
    const std::string where = in_quotes(folder.string());
    std::error_code error;
    for (fs::directory_iterator at(folder, error); !error && at != fs::directory_iterator();
         at.increment(error)) {
        const std::string ending = at->path().extension().string();
        if (std::ranges::find(kPickled, ending) != kPickled.end())
            throw Error(ErrorCode::InvalidArgument,
                        where + " has its weights in " + in_quotes(at->path().filename().string()) +
                            ": pickled files can run code and are never read; convert them to "
                            "safetensors");
    }
    throw Error(ErrorCode::InvalidArgument,
                where + " has neither " + kHfWeightsFile + " nor " + kHfIndexFile);
}

} // namespace bellows
