// SPDX-License-Identifier: MIT
#pragma once

// The `[train]` table of a configuration: how a run trains, beside the model's shape. A plain
// value, the same on every rank; nothing here touches a device.

#include <bellows/comm/message.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/layout.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// How the learning rate goes on after the warm-up, from decay_start on where there is a decay.
enum class LrSchedule : std::uint8_t {
    Cosine, ///< along half a cosine down to lr_min at decay_steps
    Wsd,  ///< warm-up, stable, decay: down to lr_min at decay_steps as 1 - sqrt(share of the decay)
    Step, ///< by lr_factors at lr_steps
    Constant, ///< it stays
};

/// "cosine", "wsd", "step" or "constant", and back. Throws Error{InvalidArgument}.
const char* to_text(LrSchedule schedule) noexcept;
void from_text(LrSchedule& schedule, const std::string& text);

/// Field names are the keys of the `[train]` table, those of TrainingShape among them.
struct TrainConfig : TrainingShape {
    std::vector<std::string> data;   ///< text files and folders
    std::string tokenizer = "bytes"; ///< or the path of a tokenizer's file or folder
    double holdout = 0;              ///< share of the tokens, at the end, kept for a last check

    std::uint64_t eval_every =
        0; ///< steps from one look at its loss to the next; 0: at the end only

    std::uint64_t steps = 100; ///< in total, resumed ones included
    std::uint64_t seed = 1;

    double lr = 1e-3;               ///< the highest, after the warm-up
    double lr_min = 0;              ///< where the decay ends
    std::uint64_t warmup_steps = 0; ///< linear from lr / warmup_steps
    LrSchedule lr_schedule = LrSchedule::Cosine;
    std::uint64_t decay_start = 0; ///< the rate stays at lr up to this step; 0: warmup_steps
    std::uint64_t decay_steps = 0; ///< the decay ends at lr_min at this step; 0: no decay
    /// After each of these steps, ascending, the rate is multiplied by its factor, whatever the
    /// schedule; a single factor counts for all.
    std::vector<std::uint64_t> lr_steps;
    std::vector<double> lr_factors;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double adam_eps = 1e-8;
    double weight_decay = 0.1;
    double clip_norm = 1; ///< of the whole gradient; 0: no clipping

    /// Of the mean loss of a model's MTP modules in the loss that gradients are of; from step
    /// mtp_late_from on, if that is not 0, mtp_late_weight instead.
    double mtp_weight = 0.3;
    double mtp_late_weight = 0.1;
    std::uint64_t mtp_late_from = 0;

    std::string device = "any"; ///< see parse_devices()
    DeviceLinkKind device_link = DeviceLinkKind::Auto;
    double peak_tflops = 0; ///< of a rank's device, for the utilisation; 0: measured at the start
    std::uint64_t checkpoint_every = 0; ///< steps; 0: by time (checkpoint_minutes)
    double checkpoint_minutes = 10;     ///< without checkpoint_every; 0: at the end only
    std::uint64_t keep_checkpoints = 2;
    std::uint64_t sample_tokens = 240; ///< of the text that the finished model writes; 0: none
    bool tensorboard = false;          ///< an event file of TensorBoard beside metrics.jsonl
    /// Seconds that a rank waits at most for its device, or for a peer that lives but does not
    /// come. Peers that die or stop are noticed in seconds, whatever this is.
    double step_timeout = 3600;

    bool operator==(const TrainConfig&) const = default;
};

/// step_timeout as what waits take.
std::chrono::milliseconds wait_limit(const TrainConfig& config) noexcept;

/// Checks every number against its range. Throws Error{InvalidArgument} that names the key.
void validate(const TrainConfig& config);

/// Reads the `[train]` table of a TOML text, if it has one; relative paths in it start from
/// `base`. `source` names the text in errors. Does not validate, so that flags can complete it.
/// Throws Error{InvalidArgument} for an unknown key or a value of the wrong kind.
TrainConfig parse_train_config(std::string_view text, std::string_view source,
                               const std::filesystem::path& base);

/// The table with every field, which parse_train_config() reads back to an equal value.
std::string to_toml(const TrainConfig& config);

/// A model and how to train it, from a configuration file or preset.
struct RunConfig {
    ModelConfig model;
    TrainConfig train;
};

/// `name` is a preset's name, or else a file. Throws Error{InvalidArgument} if it is neither,
/// Error{Io}, and what the parsers throw.
RunConfig load_run_config(const std::string& name);
RunConfig parse_run_config(std::string_view text, std::string_view source,
                           const std::filesystem::path& base);
std::string to_toml(const RunConfig& config);

/// Of the step that makes the count of done steps `step` (from 1). Does not depend on `steps`, so
/// that a run can be resumed to a later end.
double learning_rate(const TrainConfig& config, std::uint64_t step);

/// Of the mean loss of the MTP modules, of the same step.
double mtp_weight(const TrainConfig& config, std::uint64_t step);

} // namespace bellows
