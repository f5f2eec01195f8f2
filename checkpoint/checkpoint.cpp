// SPDX-License-Identifier: MIT
#include <bellows/checkpoint/checkpoint.hpp>

#include "base/records/checksum.hpp"
#include "state_file.hpp"

#include <bellows/base/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

namespace bellows {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kTemporaryPrefix = ".step-";
constexpr const char* kMetricsFile = "metrics.jsonl";
constexpr std::string_view kShardEnding = ".safetensors";

fs::path checkpoints_of(const fs::path& run) {
    return run / "checkpoints";
}

void check_io(const std::error_code& error, std::string_view verb, const fs::path& path) {
    if (error) {
        throw Error(ErrorCode::Io, errno_message(verb, path, error.value()));
    }
}

/// N of a folder named step-N (no sign, no leading zero).
std::optional<std::uint64_t> step_of(const fs::path& folder) {
    const std::string name = folder.filename().string();
    std::uint64_t step = 0;
    if (!name.starts_with(kStepPrefix)) {
        return std::nullopt;
    }
    const char* end = name.data() + name.size();
    const auto [at, error] = std::from_chars(name.data() + kStepPrefix.size(), end, step);
    const bool whole = error == std::errc() && at == end;
    return whole && name == std::string(kStepPrefix) + std::to_string(step) ? std::optional(step)
                                                                            : std::nullopt;
}

/// All step-N folders with a state.json, newest first.
std::vector<std::pair<std::uint64_t, fs::path>> complete_checkpoints(const fs::path& checkpoints) {
    std::vector<std::pair<std::uint64_t, fs::path>> found;
    std::error_code error;
    fs::directory_iterator at(checkpoints, error);
    if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) {
        return found;
    }
    for (; !error && at != fs::directory_iterator(); at.increment(error)) {
        std::error_code ignored;
        const std::optional<std::uint64_t> step = step_of(at->path());
        if (step && fs::is_regular_file(at->path() / kStateFile, ignored)) {
            found.emplace_back(*step, at->path());
        }
    }
    check_io(error, "read", checkpoints);
    std::sort(found.rbegin(), found.rend());
    return found;
}

void remove_temporaries(const fs::path& checkpoints) {
    std::vector<fs::path> stale;
    std::error_code error;
    fs::directory_iterator at(checkpoints, error);
    for (; !error && at != fs::directory_iterator(); at.increment(error)) {
        const std::string name = at->path().filename().string();
        if (name.starts_with(kTemporaryPrefix)) {
            stale.push_back(at->path());
        }
    }
    check_io(error, "read", checkpoints);
    for (const fs::path& path : stale) {
        fs::remove_all(path, error);
        check_io(error, "remove", path);
    }
}

/// Gives the temporary folder its name; what had the name before goes.
void put_in_place(const fs::path& temporary, const fs::path& target) {
    if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_NOREPLACE) == 0) {
        return;
    }
    std::error_code error;
    if (!fs::exists(fs::symlink_status(target, error))) {
        fs::rename(temporary, target, error); // a file system without RENAME_NOREPLACE
        check_io(error, "rename", temporary);
        return;
    }
    if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
        fs::path old = temporary;
        old += ".old";
        fs::rename(target, old, error);
        check_io(error, "rename", target);
        fs::rename(temporary, target, error);
        if (error) {
            std::error_code ignored;
            fs::rename(old, target, ignored);
        }
        check_io(error, "rename", temporary);
        fs::rename(old, temporary, error);
    }
    fs::remove_all(temporary, error); // the replaced one; if that fails, it is a stale temporary
}

std::string index_of(const std::vector<SafetensorsReader>& model) {
    nlohmann::json index;
    std::uint64_t total = 0;
    for (const SafetensorsReader& shard : model) {
        for (const SafetensorsReader::Tensor& tensor : shard.tensors()) {
            index["weight_map"][tensor.name] = shard.path().filename().string();
            total += tensor.bytes;
        }
    }
    index["metadata"]["total_size"] = total;
    return index.dump(1) + "\n";
}

/// "model" of "model.safetensors" and of "model-00001-of-00004.safetensors"; empty: not a shard.
std::string base_of(const std::string& file) {
    if (!file.ends_with(kShardEnding)) {
        return {};
    }
    std::string base = file.substr(0, file.size() - kShardEnding.size());
    constexpr std::size_t kCounter = 15; // "-00001-of-00004"
    if (base.size() > kCounter && base.substr(base.size() - 9, 4) == "-of-") {
        base.resize(base.size() - kCounter);
    }
    return base;
}

} // namespace

std::string shard_name(std::string_view base, std::uint64_t index, std::uint64_t count) {
    constexpr std::uint64_t kMostShards = 99999;
    if (index >= count || count > kMostShards) {
        throw Error(ErrorCode::InvalidArgument, "shard " + std::to_string(index) + " of " +
                                                    std::to_string(count) + " has no name");
    }
    if (count == 1) {
        return std::string(base) + std::string(kShardEnding);
    }
    const auto digits = [](std::uint64_t value) {
        const std::string text = std::to_string(value);
        return std::string(5 - text.size(), '0') + text;
    };
    return std::string(base) + "-" + digits(index + 1) + "-of-" + digits(count) +
           std::string(kShardEnding);
}

fs::path checkpoint_folder(const fs::path& run, std::uint64_t step) {
    return checkpoints_of(run) / (std::string(kStepPrefix) + std::to_string(step));
}

fs::path checkpoint_temporary(const fs::path& run, std::uint64_t step) {
    return checkpoints_of(run) / (std::string(kTemporaryPrefix) + std::to_string(step) + ".tmp");
}

void begin_checkpoint(const fs::path& run, std::uint64_t step) {
    std::error_code error;
    fs::create_directories(checkpoints_of(run), error);
    check_io(error, "create", checkpoints_of(run));
    remove_temporaries(checkpoints_of(run));
    const fs::path temporary = checkpoint_temporary(run, step);
    fs::create_directory(temporary, error);
    check_io(error, "create", temporary);
}

void abandon_checkpoint(const fs::path& run, std::uint64_t step) noexcept {
    try {
        std::error_code ignored;
        fs::remove_all(checkpoint_temporary(run, step), ignored);
    } catch (...) { // out of memory for a path: the next begin_checkpoint() cleans up
        return;
    }
}

fs::path commit_checkpoint(const fs::path& run, const CheckpointState& state,
                           const std::vector<std::string>& shards,
                           const std::map<std::string, std::string>& texts) {
    const fs::path temporary = checkpoint_temporary(run, state.step);
    const fs::path target = checkpoint_folder(run, state.step);
    try {
        std::map<std::string, CheckpointFile> files;
        std::vector<SafetensorsReader> model;
        for (const std::string& name : shards) {
            SafetensorsReader shard(temporary / name);
            if (!shard.has_checksums()) {
                throw Error(ErrorCode::Corrupt, in_quotes(shard.path().string()) +
                                                    " lacks check sums; it was not finished");
            }
            files[name] = {shard.file_bytes(), shard.header_checksum()};
            if (base_of(name) == "model") {
                model.push_back(std::move(shard));
            }
        }
        std::map<std::string, std::string> written = texts;
        if (model.size() > 1) {
            written["model.safetensors.index.json"] = index_of(model);
        }
        for (const auto& [name, content] : written) {
            write_file_durably(temporary / name, content);
            files[name] = {content.size(), crc32_of(content.data(), content.size())};
        }
        write_file_durably(temporary / kStateFile, format_checkpoint_state(state, files));
        sync_directory(temporary);
        put_in_place(temporary, target);
        sync_directory(checkpoints_of(run));
    } catch (...) {
        abandon_checkpoint(run, state.step);
        throw;
    }
    return target;
}

std::optional<fs::path> latest_checkpoint(const fs::path& run) {
    const auto found = complete_checkpoints(checkpoints_of(run));
    return found.empty() ? std::nullopt : std::optional(found.front().second);
}

std::vector<fs::path> list_checkpoints(const fs::path& run) {
    std::vector<fs::path> folders;
    for (const auto& [step, folder] : complete_checkpoints(checkpoints_of(run)))
        folders.push_back(folder);
    return folders;
}

std::optional<fs::path> run_of_checkpoint(const fs::path& folder) {
    const fs::path checkpoints = folder.parent_path();
    return step_of(folder) && checkpoints == checkpoints_of(checkpoints.parent_path())
               ? std::optional(checkpoints.parent_path())
               : std::nullopt;
}

std::vector<fs::path> set_aside_newer_checkpoints(const fs::path& run, std::uint64_t step) {
    std::vector<fs::path> renamed;
    std::error_code error;
    for (const auto& [number, folder] : complete_checkpoints(checkpoints_of(run))) {
        if (number <= step) {
            break;
        }
        fs::path name = folder;
        name += ".abandoned";
        for (int again = 2; fs::exists(fs::symlink_status(name, error)); ++again) {
            name = folder;
            name += ".abandoned-" + std::to_string(again);
        }
        const fs::path metrics = run / kMetricsFile;
        if (renamed.empty() && fs::exists(metrics, error)) {
            fs::copy_file(metrics, folder / kMetricsFile, fs::copy_options::overwrite_existing,
                          error);
            check_io(error, "copy", metrics);
        }
        fs::rename(folder, name, error);
        check_io(error, "rename", folder);
        renamed.push_back(name);
    }
    return renamed;
}

void prune_checkpoints(const fs::path& run, std::uint64_t keep, const fs::path& spared) {
    const auto found = complete_checkpoints(checkpoints_of(run));
    for (std::size_t i = keep; i < found.size(); ++i) {
        // Paths may be written in different ways; the names of one run's checkpoints differ.
        if (found[i].second.filename() == spared.filename()) {
            continue;
        }
        // Renamed first: a folder that is half deleted must not look like a checkpoint.
        const fs::path temporary = checkpoint_temporary(run, found[i].first);
        std::error_code error;
        fs::rename(found[i].second, temporary, error);
        check_io(error, "rename", found[i].second);
        fs::remove_all(temporary, error);
        check_io(error, "remove", temporary);
    }
}

Checkpoint Checkpoint::open(const fs::path& path) {
    Checkpoint checkpoint;
    std::error_code error;
    fs::path folder = path;
    if (!fs::exists(path / kStateFile, error)) {
        auto found = complete_checkpoints(checkpoints_of(path));
        if (found.empty()) {
            found = complete_checkpoints(path);
        }
        if (found.empty()) {
            throw Error(ErrorCode::InvalidArgument,
                        "no checkpoint in " + in_quotes(path.string()) +
                            "; give a run's folder or one of its checkpoints/step-N");
        }
        folder = found.front().second;
    }
    // Its parents say which run it belongs to, however it was named: run/checkpoints/step-1/, a
    // link.
    checkpoint.folder_ = fs::canonical(folder, error);
    check_io(error, "read", folder);
    checkpoint.read_state();
    checkpoint.open_shards();
    return checkpoint;
}

void Checkpoint::read_state() {
    std::map<std::string, CheckpointFile> files;
    state_ = parse_checkpoint_state(folder_ / kStateFile, files);
    files_ = std::move(files);
    for (const auto& [name, file] : files_) {
        std::error_code error;
        const std::uint64_t bytes = fs::file_size(folder_ / name, error);
        check_io(error, "read", folder_ / name);
        if (bytes != file.bytes) {
            throw Error(ErrorCode::Corrupt, in_quotes((folder_ / name).string()) + " holds " +
                                                std::to_string(bytes) + " bytes, not " +
                                                std::to_string(file.bytes) +
                                                ": the checkpoint was damaged or changed");
        }
    }
}

void Checkpoint::open_shards() {
    for (const auto& [name, file] : files_) {
        const std::string base = base_of(name);
        if (base.empty()) {
            continue;
        }
        SafetensorsReader& shard = shards_.emplace_back(folder_ / name);
        if (!shard.has_checksums() || shard.header_checksum() != file.checksum) {
            throw Error(ErrorCode::Corrupt, in_quotes(shard.path().string()) +
                                                " does not fit the check sum in state.json: the "
                                                "checkpoint was damaged or changed");
        }
        for (const SafetensorsReader::Tensor& tensor : shard.tensors()) {
            if (!index_[base].emplace(tensor.name, shards_.size() - 1).second) {
                throw Error(ErrorCode::Corrupt, in_quotes(folder_.string()) + ": tensor " +
                                                    in_quotes(tensor.name) +
                                                    " stands in two shards of " + in_quotes(base));
            }
        }
    }
}

std::string Checkpoint::text(const std::string& file) const {
    const auto entry = files_.find(file);
    if (entry == files_.end()) {
        throw Error(ErrorCode::InvalidArgument, "checkpoint " + in_quotes(folder_.string()) +
                                                    " has no file " + in_quotes(file));
    }
    std::string content = read_file(folder_ / file, entry->second.bytes);
    if (crc32_of(content.data(), content.size()) != entry->second.checksum) {
        throw Error(ErrorCode::Corrupt, in_quotes((folder_ / file).string()) +
                                            " does not fit its check sum in state.json: the "
                                            "checkpoint was damaged or changed");
    }
    return content;
}

const SafetensorsReader* Checkpoint::find(std::string_view base,
                                          std::string_view tensor) const noexcept {
    const auto names = index_.find(base);
    if (names == index_.end()) {
        return nullptr;
    }
    const auto shard = names->second.find(tensor);
    return shard == names->second.end() ? nullptr : &shards_[shard->second];
}

const SafetensorsReader& Checkpoint::require(std::string_view base, std::string_view tensor) const {
    if (const SafetensorsReader* shard = find(base, tensor)) {
        return *shard;
    }
    throw Error(ErrorCode::InvalidArgument, "checkpoint " + in_quotes(folder_.string()) +
                                                " has no " + std::string(base) + " tensor " +
                                                in_quotes(tensor));
}

std::vector<StoredTensor> Checkpoint::tensors(std::string_view base) const {
    std::vector<StoredTensor> out;
    if (const auto names = index_.find(base); names != index_.end()) {
        for (const auto& [name, shard] : names->second) {
            out.push_back(*shards_[shard].find(name));
        }
    }
    return out;
}

void Checkpoint::verify() const {
    for (const auto& [name, file] : files_) {
        if (base_of(name).empty()) {
            (void)text(name);
        }
    }
    for (const SafetensorsReader& shard : shards_) {
        shard.verify();
    }
}

} // namespace bellows
