// SPDX-License-Identifier: MIT
#include "app/command_line.hpp"

#include "app/commands.hpp"
#include "app/exit_code.hpp"
#include "app/model_folder.hpp"
#include "app/options/completion.hpp"
#include "app/options/option_table.hpp"
#include "app/progress.hpp"
#include "app/relaunch.hpp"
#include "app/stop_signal.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/printable.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/comm/phase.hpp>
#include <bellows/engine/device_choice.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

namespace bellows {

namespace {

bool is_first_rank() {
    return !is_launched() || launched_rank() <= 0;
}

/// Whether it is this process that tells a person of an error. Where our launcher started the
/// ranks, it tells. Else the first rank does as long as the ranks only read their input, which is
/// the same for all; and then the rank that the error is about, or for a lost one the first other.
bool tells(const Error& error, bool input_is_good) {
    if (has_launcher()) {
        return false;
    }
    if (!is_launched() || !input_is_good) {
        return is_first_rank();
    }
    const int rank = launched_rank();
    const bool lost = error.code() == ErrorCode::PeerLost || error.code() == ErrorCode::Timeout;
    const bool about_this = error.rank() < 0 || error.rank() == rank;
    return about_this || (lost && rank == (error.rank() == 0 ? 1 : 0));
}

/// One line; with this rank in front unless it names one already.
std::string line_of(const Error& error, bool input_is_good) {
    constexpr std::size_t kLongestLine = 4000;
    std::string text = error.message();
    for (std::size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at)) {
        const std::size_t end = std::min(text.find_first_not_of(" \n", at), text.size());
        const bool opens = at > 0 && text[at - 1] == ':';
        text.replace(at, end - at, end == text.size() ? "" : opens ? " " : "; ");
    }
    text = bounded(text, kLongestLine); // whoever made it, it does not steer the terminal
    const bool named = text.starts_with("rank ");
    return is_launched() && input_is_good && !named
               ? "rank " + std::to_string(launched_rank()) + ": " + text
               : text;
}

/// Starts this very command once per rank, and tells what ended the first that failed.
int start_ranks(std::uint64_t ranks, const std::vector<std::string>& arguments, bool can_stop,
                bool outlive) {
    ::setenv(kTerminalVariable, ProgressReporter::terminal_of(stdout).c_str(), 1);
    const LaunchResult result = relaunch(static_cast<int>(ranks), arguments, can_stop, outlive);
    // Rank 0 has said what the ends of a run mean.
    const bool told = result.exit_code == kExitStopped || result.exit_code == kExitNotSaved;
    if (result.exit_code != 0 && !told) {
        std::fprintf(stderr, "bellows: %s\n", reason_of(result).c_str());
    }
    return result.exit_code;
}

int train(const TrainFlags& flags, int argc, const char* const* argv, const Commands& commands,
          bool& input_is_good) {
    const TrainOptions options = resolve_train(flags);
    // Where our launcher started the ranks, it has checked their input.
    if (!is_launched() || (launched_rank() <= 0 && !has_launcher())) {
        check_training_input(options);
    }
    if (options.ranks() > 1 && !is_launched()) {
        std::vector<std::string> arguments(argv + 1, argv + argc);
        if (options.resume) // the one that has been read through
            arguments.insert(arguments.end(), {"--resume", options.resume->string()});
        return start_ranks(options.ranks(), arguments, /*can_stop=*/true, /*outlive=*/false);
    }
    input_is_good = true;
    watch_stop_signals();
    return commands.train(options);
}

int generate(const GenerateFlags& flags, int argc, const char* const* argv,
             const Commands& commands, bool& input_is_good) {
    const GenerateOptions options = resolve_generate(flags);
    if (options.ranks > 1 && !is_launched())
        return start_ranks(options.ranks, {argv + 1, argv + argc}, /*can_stop=*/false,
                           options.allow_degraded);
    input_is_good = true;
    return commands.generate(options);
}

int print(const std::string& text) {
    if (is_first_rank())
        std::fputs(text.c_str(), stdout);
    return kExitGood;
}

/// Close names only: a list of all flags is what --help is for.
std::string close_name(const std::string& word, const std::vector<std::string>& names) {
    const std::string found = suggestion(word, names);
    return found.starts_with("; did you mean") ? found : "";
}

/// The error says in one line what CLI11 did not understand, and the way out.
Error usage_error(const CommandLine& line, const CLI::ParseError& error) {
    std::string command = "bellows", what = error.what();
    const CLI::App* used = &line.app;
    while (!used->get_subcommands().empty()) {
        used = used->get_subcommands().front();
        command += " " + used->get_name();
    }
    std::vector<std::string> unknown = used->remaining(); // the first says enough
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && !unknown.empty()) {
        const std::string name = unknown.front().substr(0, unknown.front().find('='));
        const bool flag = name.starts_with('-');
        what = flag ? "there is no flag " + in_quotes(name) + close_name(name, flag_names(*used))
                    : in_quotes(name) + " belongs to no flag";
    }
    return Error(ErrorCode::InvalidArgument, what + "; `" + command + " --help` lists the flags");
}

/// Throws Error{InvalidArgument} if a word stands where a command is named and names none. before:
/// the words ahead of it.
void check_name(const std::string& word, const std::vector<const CLI::App*>& commands,
                const std::string& before) {
    std::vector<std::string> names;
    for (const CLI::App* command : commands)
        names.push_back(command->get_name());
    if (!word.starts_with('-') && std::ranges::find(names, word) == names.end())
        throw Error(ErrorCode::InvalidArgument, "there is no command " + in_quotes(word) +
                                                    close_name(word, names) + "; `" + before +
                                                    " --help` lists them");
}

int run_subcommand(int argc, const char* const* argv, const Commands& commands,
                   bool& input_is_good) {
    CommandLine line(commands);
    if (argc > 1)
        check_name(argv[1], line.subcommands(), "bellows");
    if (argc > 2 && argv[1] == line.plan->get_name())
        check_name(argv[2], subcommands_of(*line.plan), "bellows plan");
    try {
        line.app.parse(argc, argv);
    } catch (const CLI::Success& help) {
        if (is_first_rank()) {
            line.app.exit(help);
        }
        return kExitGood;
    } catch (const CLI::ParseError& error) {
        throw usage_error(line, error);
    }
    if (line.chosen(line.completion)) {
        return print(bash_completion(line.subcommands()));
    }
    if (line.chosen(line.config)) {
        return print(config_text(line.config_flags));
    }
    if (line.chosen(line.export_model)) {
        return is_first_rank() ? run_export(line.export_flags) : kExitGood;
    }
    if (line.chosen(line.info)) {
        return line.info_flags.model ? print_model_info(line.info_flags)
                                     : commands.info(resolve_info(line.info_flags));
    }
    if (line.chosen(line.selftest)) {
        input_is_good = true;
        line.selftest_options.device = line.selftest_device.value_or(kAnyDevice);
        return commands.selftest(line.selftest_options);
    }
    if (line.chosen(line.schedule)) {
        return is_first_rank() ? print_schedule(resolve_schedule(line.schedule_flags)) : kExitGood;
    }
    if (line.chosen(line.plan_experts)) {
        return is_first_rank() ? print_expert_plan(resolve_plan_experts(line.plan_experts_flags))
                               : kExitGood;
    }
    if (line.chosen(line.generate)) {
        return generate(line.generate_flags, argc, argv, commands, input_is_good);
    }
    if (line.chosen(line.chat)) {
        return commands.chat(resolve_chat(line.chat_flags));
    }
    return train(line.train_flags, argc, argv, commands, input_is_good);
}

} // namespace

int run_command_line(int argc, const char* const* argv, const Commands& commands) {
    // A full disk, a quota or a reader that went away are errors of the call that met them.
    std::signal(SIGXFSZ, SIG_IGN);
    std::signal(SIGPIPE, SIG_IGN);
    if (is_launched()) {
        report_alive(launched_rank());
    }
    bool input_is_good = false; // from then on, every rank speaks for itself
    int code = kExitGood;
    std::optional<Error> failure;
    try {
        code = run_subcommand(argc, argv, commands, input_is_good);
    } catch (const Error& error) {
        failure = error;
    } catch (const std::bad_alloc&) {
        failure.emplace(ErrorCode::OutOfMemory, "out of host memory");
    } catch (const std::exception& error) {
        failure.emplace(ErrorCode::Internal, std::string("internal error: ") + error.what());
    }
    std::fflush(stdout);
    std::string message;
    if (failure) {
        code = exit_code_of(failure->code());
        message = line_of(*failure, input_is_good);
        if (tells(*failure, input_is_good)) {
            std::fprintf(stderr, "bellows: %s\n", message.c_str());
        }
    }
    if (is_launched()) {
        report_exit(launched_rank(), code, message);
        begin_phase(launched_rank(), "after the end of its work", kEndLimit);
    }
    return code;
}

} // namespace bellows
