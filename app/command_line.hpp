// SPDX-License-Identifier: MIT
#pragma once

// From flags as typed to checked options: the steps of run_command_line() that need neither a
// terminal nor a device.

#include "app/commands.hpp"
#include "app/pictures/schedule_report.hpp"
#include "app/plan/experts.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// What was typed; empty: not given.
struct TrainFlags {
    std::optional<std::string> config;
    std::vector<std::string> data;
    std::optional<std::uint64_t> ranks, steps, dp, ep, pp, batch, micro_batches, seq, seed;
    std::optional<std::uint64_t> checkpoint_every, eval_every, warmup, decay;
    std::optional<std::uint64_t> eplb_every, eplb_slots;
    std::optional<double> lr, holdout, peak_tflops;
    std::optional<std::string> precision, device, device_link, pipeline, pairs, tokenizer;
    std::vector<std::string> set{}; ///< "train.lr=1e-3"
    std::optional<std::filesystem::path> out, resume, init;
    bool fall_back = false;
    bool tensorboard = false;
};

struct ExportFlags {
    std::filesystem::path checkpoint{}, out{};
    std::optional<std::string> dtype{}, shard_size{};
};

/// `generate` and `chat` have these flags.
struct GenerateFlags {
    std::filesystem::path checkpoint;
    std::optional<std::string> prompt{}, file{}, prompts{}, system{};
    bool chat = false, json = false, exact = false, ignore_end = false, times = false,
         allow_degraded = false;
    std::vector<std::string> data{}, stop{};
    std::optional<std::string> device{}, precision{}, tokenizer{}, cache_type{}, draft{};
    std::optional<std::filesystem::path> placement{};
    std::optional<std::uint64_t> tokens{}, context{}, seed{}, top_k{}, ranks{};
    std::optional<double> temperature{}, top_p{}, min_p{}, repetition_penalty{}, presence_penalty{},
        frequency_penalty{};
};

struct InfoFlags {
    std::optional<std::string> model, device;
    bool json = false, kernels = false, retune = false;
};

struct ScheduleFlags {
    std::optional<std::string> kind{}, costs{}, format{}, order{};
    std::optional<std::uint64_t> ranks{}, micro_batches{}, chunks{}, layers{};
    std::optional<std::filesystem::path> out{};
    bool compare = false, pair = false, decoupled = false, early_gradients = false;
};

struct PlanExpertsFlags {
    std::filesystem::path loads{};
    std::optional<std::uint64_t> groups{}, nodes{}, ranks{}, slots{};
    bool distinct = false, json = false;
};

struct ConfigFlags {
    std::optional<std::string> dump{};
    bool list = false;
};

/// Configuration, then --set and the other flags over it, then the checks that need no data. A
/// resumed run takes the checkpoint's configuration unless --config is given, and --out is the
/// resumed run's folder. Throws Error{InvalidArgument}, Error{Io}, Error{Corrupt}.
TrainOptions resolve_train(const TrainFlags& flags);

/// Reads data and checkpoint through once, as a run would, and looks at --out, so that a bad one
/// is refused before anything starts.
void check_training_input(const TrainOptions& options);

/// Opens the checkpoint, takes the run's configuration from it, and reads the prompts.
GenerateOptions resolve_generate(const GenerateFlags& flags);
/// The same for a conversation, whose prompts come later.
GenerateOptions resolve_chat(const GenerateFlags& flags);

/// Throws Error{InvalidArgument} for flags that do not go together.
InfoOptions resolve_info(const InfoFlags& flags);

/// Throws Error{InvalidArgument} for flags that do not go together; what numbers a schedule takes
/// is print_schedule()'s to say.
ScheduleOptions resolve_schedule(const ScheduleFlags& flags);

/// Reads the loads. Throws Error{InvalidArgument}, Error{Io}, Error{Corrupt}; which numbers go
/// together is print_expert_plan()'s to say.
ExpertPlanOptions resolve_plan_experts(const PlanExpertsFlags& flags);

/// The text that `bellows config` prints. It throws Error{InvalidArgument} for flags that do not go
/// together and for what is no configuration.
std::string config_text(const ConfigFlags& flags);

/// `bellows info --model`: parameters in total and per token, on standard output.
int print_model_info(const InfoFlags& flags);

} // namespace bellows
