// SPDX-License-Identifier: MIT
#pragma once

// Checkpoints of a run: `<run>/checkpoints/step-N/` with model and optimizer tensors (safetensors,
// one or several shards each), the configuration as run, and state.json, which pins every other
// file by size and check sum. A checkpoint is written under a temporary name and renamed, so that
// the folder holds complete ones only. All ranks of a run see one file system. Host only; the
// functions say which ranks call them.

#include <bellows/checkpoint/safetensors.hpp>
#include <bellows/checkpoint/state.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// The configuration of the run that wrote a checkpoint, among its texts.
inline constexpr const char* kConfigFile = "config.toml";
/// The file of the run's tokenizer, among its texts unless the tokenizer is "bytes".
inline constexpr const char* kTokenizerFile = "tokenizer.model";

/// "model.safetensors" for one shard, else "model-00002-of-00004.safetensors" for index 1.
std::string shard_name(std::string_view base, std::uint64_t index, std::uint64_t count);

/// Where the ranks write their shards of step `step` before the commit.
std::filesystem::path checkpoint_temporary(const std::filesystem::path& run, std::uint64_t step);

/// Rank 0, before the others write: removes what earlier, broken attempts left, makes the run's
/// folders and an empty temporary one. Throws Error{Io}.
void begin_checkpoint(const std::filesystem::path& run, std::uint64_t step);

/// Rank 0, after every rank has finished its shards: checks that `shards` are there with check
/// sums, adds `texts` (file name → content, e.g. config.toml), model.safetensors.index.json if the
/// model has several shards, and state.json, then renames. A checkpoint of the same step is
/// replaced. Returns the final folder. Throws Error{Io} (a full disk, say), Error{Corrupt} if a
/// shard is not whole; the temporary folder is gone then, and earlier checkpoints stay.
std::filesystem::path commit_checkpoint(const std::filesystem::path& run,
                                        const CheckpointState& state,
                                        const std::vector<std::string>& shards,
                                        const std::map<std::string, std::string>& texts);

/// Rank 0, if any rank failed between begin and commit: removes the temporary folder, if it can.
void abandon_checkpoint(const std::filesystem::path& run, std::uint64_t step) noexcept;

/// The newest complete checkpoint of a run, if it has any. Throws Error{Io}.
std::optional<std::filesystem::path> latest_checkpoint(const std::filesystem::path& run);

/// The run that a checkpoint's folder is part of: R of R/checkpoints/step-N. Nothing for a copy
/// that stands elsewhere or has another name.
std::optional<std::filesystem::path> run_of_checkpoint(const std::filesystem::path& folder);

/// Rank 0, before a run goes on from step `step`: renames its newer checkpoints to
/// step-N.abandoned, so that they are neither taken for the newest nor pruned, and puts a copy of
/// metrics.jsonl into the newest of them. Returns the new names, newest first. Throws Error{Io}.
std::vector<std::filesystem::path> set_aside_newer_checkpoints(const std::filesystem::path& run,
                                                               std::uint64_t step);

/// Rank 0: deletes all but the `keep` newest checkpoints, and stale temporaries. Throws Error{Io}.
void prune_checkpoints(const std::filesystem::path& run, std::uint64_t keep);

/// An opened checkpoint: state, files and the headers of all shards have been checked; tensor bytes
/// are checked as they are read. Every rank opens its own.
class Checkpoint {
public:
    /// `path` is a step folder, a run's folder or its `checkpoints` folder (the newest complete one
    /// then). Throws Error{InvalidArgument} if there is no checkpoint, Error{Io},
    /// Error{InvalidArgument} if a later version wrote it in a format that this one does not know,
    /// Error{Corrupt} if anything does not fit its size or check sum.
    static Checkpoint open(const std::filesystem::path& path);

    /// Absolute, without links.
    const std::filesystem::path& folder() const noexcept { return folder_; }
    const CheckpointState& state() const noexcept { return state_; }
    bool has_text(const std::string& file) const { return files_.contains(file); }
    /// A file added by commit_checkpoint. Throws Error{Corrupt} if it does not fit its check sum,
    /// Error{InvalidArgument} if the checkpoint has no such file.
    std::string text(const std::string& file) const;

    /// The shard that holds the tensor, or null. `base` as in shard_name(): "model", "optimizer".
    const SafetensorsReader* find(std::string_view base, std::string_view tensor) const noexcept;
    /// As find(), but Error{InvalidArgument} if there is none.
    const SafetensorsReader& require(std::string_view base, std::string_view tensor) const;
    /// All tensors of a base, sorted by name.
    std::vector<StoredTensor> tensors(std::string_view base) const;
    /// Reads everything once. Throws Error{Corrupt}.
    void verify() const;

private:
    void read_state();
    void open_shards();

    std::filesystem::path folder_;
    CheckpointState state_;
    std::map<std::string, CheckpointFile> files_;
    std::vector<SafetensorsReader> shards_;
    std::map<std::string, std::map<std::string, std::size_t, std::less<>>, std::less<>> index_;
};

} // namespace bellows
