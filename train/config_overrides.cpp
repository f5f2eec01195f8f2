// SPDX-License-Identifier: MIT
#include <bellows/train/config_overrides.hpp>

#include "base/toml_fields.hpp"

#include <optional>
#include <sstream>
#include <vector>

namespace bellows {

namespace {

using toml_fields::refuse;

constexpr std::string_view kSource = "--set";

struct Assignment {
    std::string table, key, value;
};

Assignment parse_assignment(const std::string& text) {
    const std::size_t equals = text.find('=');
    const std::size_t dot = text.find('.');
    if (equals == std::string::npos || dot == std::string::npos || dot > equals)
        refuse("--set takes model.KEY=VALUE or train.KEY=VALUE, not " + in_quotes(text));
    Assignment set{text.substr(0, dot), text.substr(dot + 1, equals - dot - 1),
                   text.substr(equals + 1)};
    if (set.table != "model" && set.table != "train")
        refuse("--set: a configuration has the tables model and train, not " +
               in_quotes(set.table));
    return set;
}

/// A table whose only key is "value"; nothing where the text is not one TOML value.
std::optional<toml::table> parse_value(const std::string& text) {
    try {
        toml::table table = toml::parse("value = " + text + "\n");
        if (table.size() == 1 && table.contains("value"))
            return table;
    } catch (const toml::parse_error&) {
    }
    return std::nullopt;
}

void assign(toml::table& root, const std::string& text) {
    const Assignment set = parse_assignment(text);
    toml::table& table = *root[set.table].as_table();
    if (!table.contains(set.key)) { // a printed configuration has all keys
        std::vector<std::string> known;
        for (const auto& [key, value] : table)
            known.emplace_back(key.str());
        refuse("--set: unknown key " + in_quotes(set.key) + " in [" + set.table + "]" +
               suggestion(set.key, known));
    }
    if (const std::optional<toml::table> value = parse_value(set.value))
        table.insert_or_assign(set.key, *value->get("value"));
    else
        table.insert_or_assign(set.key, set.value);
}

/// "--set:17: what" → "--set: what": the line is of a text that nobody has seen.
std::string without_line(const std::string& message) {
    const std::string begin = std::string(kSource) + ":";
    if (!message.starts_with(begin))
        return message;
    const std::size_t end = message.find_first_not_of("0123456789", begin.size());
    return begin +
           message.substr(end == std::string::npos || message[end] != ':' ? begin.size() : end + 1);
}

} // namespace

RunConfig with_overrides(const RunConfig& config, std::span<const std::string> assignments,
                         const std::filesystem::path& base) {
    if (assignments.empty())
        return config;
    toml::table root = toml_fields::parse(to_toml(config), kSource);
    for (const std::string& text : assignments)
        assign(root, text);
    std::ostringstream out;
    out << root;
    try {
        return parse_run_config(out.str(), kSource, base);
    } catch (const Error& error) {
        throw Error(error.code(), without_line(error.message()));
    }
}

} // namespace bellows
