// SPDX-License-Identifier: MIT
#pragma once

// A Trainer's state to and from checkpoints: f32 weights under their own names in "model" shards,
// AdamW's moments as NAME.adam_m and NAME.adam_v in "optimizer" shards.

#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/checkpoint/weights.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/train/trainer.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace bellows {

/// How long ranks wait for each other's disks. A rank that has died or stands still ends the wait
/// long before.
inline constexpr std::chrono::hours kDiskPatience{24};

/// Collective. Each rank writes what it stands for below the folder `run`, rank 0 adds `texts`
/// (file name → content, e.g. config.toml) and `loss` (see CheckpointState) and commits. Throws on
/// every rank Error{Io} if any could not write, Error{Diverged}, which names the tensor, if any has
/// a weight or a moment that is not finite; earlier checkpoints stay. The checkpoint's folder.
std::filesystem::path save_checkpoint(const std::filesystem::path& run,
                                      const std::map<std::string, std::string>& texts,
                                      Trainer& trainer, World& world, std::uint64_t steps_done,
                                      std::optional<double> loss = std::nullopt);

/// Collective: reads what this rank needs, from a checkpoint of any layout, and waits for the other
/// ranks, so that no exchange with a slower one runs out of time. Throws on every rank if any could
/// not read.
void load_checkpoint(const Checkpoint& checkpoint, Trainer& trainer, World& world);

/// The first weights of a run, for its Trainer: those of a Hugging Face folder, of which each rank
/// reads what it needs and then waits for the others. Folder and world outlive the Trainer's
/// construction. on_progress, if any, gets how many of this rank's elements have been set. On every
/// rank the constructor throws if any could not read.
FirstWeights
weights_of(const HfFolder& folder, World& world,
           std::function<void(std::uint64_t done, std::uint64_t total)> on_progress = {});

} // namespace bellows
