// SPDX-License-Identifier: MIT
#include "app/options/completion.hpp"

#include "app/options/option_table.hpp"

#include <bellows/schedule/schedule.hpp>
#include <bellows/shape/presets.hpp>

#include <algorithm>
#include <sstream>

namespace bellows {

namespace {

std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words)
        text += (text.empty() ? "" : " ") + word;
    return text;
}

std::vector<std::string> schedule_kinds() {
    std::vector<std::string> names;
    for (std::size_t kind = 0; kind < kNumScheduleKinds; ++kind)
        names.emplace_back(to_string(static_cast<ScheduleKind>(kind)));
    return names;
}

/// The values that a flag takes, which the name of its type tells: it has alternatives between '|',
/// and those without capitals are words as they are.
struct Values {
    std::vector<std::string> words;
    bool files = false, folders = false;
};

Values values_of(const std::string& type) {
    Values values;
    std::istringstream all(type);
    for (std::string one; std::getline(all, one, '|');) {
        const auto add = [&values](const std::vector<std::string>& words) {
            values.words.insert(values.words.end(), words.begin(), words.end());
        };
        if (one == "FILE" || one == "PATH")
            values.files = true;
        else if (one == "DIR")
            values.folders = true;
        else if (one == "PRESET")
            add(preset_names());
        else if (one == "KIND")
            add(schedule_kinds());
        else if (!one.empty() && one.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-") ==
                                     std::string::npos)
            add({one});
    }
    return values;
}

/// A command as it is typed, "plan experts", and its parser.
struct TypedCommand {
    std::string name;
    const CLI::App* app;
};

/// Returns all commands that can be typed: each command is followed by its subcommands.
std::vector<TypedCommand> with_subcommands(const std::vector<const CLI::App*>& commands) {
    std::vector<TypedCommand> all;
    for (const CLI::App* command : commands) {
        all.push_back({command->get_name(), command});
        for (const CLI::App* sub : subcommands_of(*command))
            all.push_back({command->get_name() + " " + sub->get_name(), sub});
    }
    return all;
}

std::vector<std::string> names_of(const std::vector<const CLI::App*>& commands) {
    std::vector<std::string> names;
    for (const CLI::App* command : commands)
        names.push_back(command->get_name());
    return names;
}

/// Branches of `case "$command $previous"`.
void write_values(std::ostream& out, const std::string& name, const CLI::App& command) {
    for (const CLI::Option* option : command.get_options()) {
        if (option->get_lnames().empty() || option->get_items_expected_max() == 0)
            continue;
        const Values values = values_of(option->get_type_name());
        out << "    '" << name << " --" << option->get_lnames().front() << "')\n"
            << "        words='" << joined(values.words) << "'"
            << (values.files     ? " paths=-f"
                : values.folders ? " paths=-d"
                                 : "")
            << " ;;\n";
    }
}

} // namespace

std::string bash_completion(const std::vector<const CLI::App*>& commands) {
    std::ostringstream out;
    const std::vector<TypedCommand> all = with_subcommands(commands);
    std::string with_two_words;
    for (const CLI::App* command : commands)
        if (!subcommands_of(*command).empty())
            with_two_words += (with_two_words.empty() ? "" : "|") + command->get_name();
    out << R"(# bash completion for bellows; printed by `bellows completion bash`
_bellows() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local command=${COMP_WORDS[1]} words='' paths=''
    COMPREPLY=()
    case "$command" in
    )" << with_two_words
        << R"()
        [ "$COMP_CWORD" -eq 2 ] || command="$command ${COMP_WORDS[2]}" ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words=')"
        << joined(names_of(commands)) << R"( --help --version'
    else
        case "$command $previous" in
)";
    for (const TypedCommand& command : all)
        write_values(out, command.name, *command.app);
    out << R"(    *)
        case "$command" in
)";
    for (const TypedCommand& command : all) {
        std::vector<std::string> words = names_of(subcommands_of(*command.app));
        for (const std::string& flag : flag_names(*command.app))
            words.push_back(flag);
        out << "        '" << command.name << "') words='" << joined(words)
            << (command.name == "completion" ? " bash" : "") << "' ;;\n";
    }
    out << R"(        esac ;;
        esac
    fi
    [ -z "$words" ] || COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ -n "$paths" ]; then
        compopt -o filenames 2>/dev/null
        local IFS=$'\n'
        COMPREPLY+=($(compgen "$paths" -- "$current"))
    fi
}
complete -F _bellows bellows
)";
    return out.str();
}

} // namespace bellows
