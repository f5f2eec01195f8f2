// SPDX-License-Identifier: MIT
#pragma once

// How `--help` looks: options in groups, at most 80 columns, examples and exit codes below. Pure
// functions, any thread.

#include <CLI/CLI.hpp>

#include <cstddef>
#include <string>
#include <string_view>

namespace bellows {

inline constexpr std::size_t kHelpColumns = 80;

/// The words of a text in lines of at most `columns` characters, each but the first behind `indent`
/// spaces; `begin` characters of the first line are taken. A longer word has a line of its own.
std::string wrapped(std::string_view text, std::size_t columns, std::size_t indent,
                    std::size_t begin);

/// The end of a help page: paragraphs are wrapped, lines that begin with a space stay as they are.
/// The exit codes stand below.
std::string help_footer(std::string_view text);

class HelpFormatter : public CLI::Formatter {
public:
    HelpFormatter();
    std::string make_help(const CLI::App* app, std::string name,
                          CLI::AppFormatMode mode) const override;
    std::string make_option(const CLI::Option* option, bool is_positional) const override;
    std::string make_subcommand(const CLI::App* command) const override;
    std::string make_footer(const CLI::App* app) const override;
};

// These stand below the options of each subcommand: text and examples.
extern const char* const kMainHelp;
extern const char* const kTrainHelp;
extern const char* const kGenerateHelp;
extern const char* const kChatHelp;
extern const char* const kExportHelp;
extern const char* const kInfoHelp;
extern const char* const kSelftestHelp;
extern const char* const kScheduleHelp;
extern const char* const kPlanHelp;
extern const char* const kPlanExpertsHelp;
extern const char* const kConfigHelp;
extern const char* const kCompletionHelp;

} // namespace bellows
