// SPDX-License-Identifier: MIT
#pragma once

// The commands and flags of `bellows`, in one table: what is parsed, what --help shows and what a
// shell completes.

#include "app/command_line.hpp"
#include "app/commands.hpp"

#include <CLI/CLI.hpp>

#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// The subcommands that exist, and what was typed for them.
struct CommandLine {
    explicit CommandLine(const Commands& commands);

    bool chosen(const CLI::App* command) const { return command != nullptr && command->parsed(); }
    /// All subcommands, in the order in which --help lists them.
    std::vector<const CLI::App*> subcommands() const;

    CLI::App app{"Bellows trains and runs mixture-of-experts language models on any Vulkan device.",
                 "bellows"};
    CLI::App* info = nullptr;
    CLI::App* schedule = nullptr;
    CLI::App* plan = nullptr;
    CLI::App* plan_experts = nullptr; ///< of plan
    CLI::App* config = nullptr;
    CLI::App* completion = nullptr;
    CLI::App* export_model = nullptr;
    CLI::App* selftest = nullptr; // from here on null if they do not exist
    CLI::App* train = nullptr;
    CLI::App* generate = nullptr;
    CLI::App* chat = nullptr;
    InfoFlags info_flags;
    SelftestOptions selftest_options;
    std::optional<std::string> selftest_device;
    TrainFlags train_flags;
    GenerateFlags generate_flags, chat_flags;
    ExportFlags export_flags;
    ScheduleFlags schedule_flags;
    PlanExpertsFlags plan_experts_flags;
    ConfigFlags config_flags;
    std::string shell; ///< that completion is for
};

/// The subcommands of a command, in the order in which --help lists them.
std::vector<const CLI::App*> subcommands_of(const CLI::App& command);

/// The names of a command's flags: "--help", "--config", ...
std::vector<std::string> flag_names(const CLI::App& command);

} // namespace bellows
