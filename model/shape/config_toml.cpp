// SPDX-License-Identifier: MIT
// Configurations as TOML: the [model] table, read and written.
#include "config_fields.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>

#include <toml++/toml.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace bellows {
namespace {

using namespace config_fields;

/// Reads the nodes of one parsed text; knows how to say where in it a key stands.
class Reader {
public:
    explicit Reader(std::string_view source) : source_(source) {}

    std::string at(const toml::source_region& region) const {
        return source_ + ":" + std::to_string(region.begin.line) + ": ";
    }

    void read(ModelConfig& config, const toml::table& table) const {
        for (const Field& field : config_fields::all()) {
            if (const toml::node* node = table.get(field.name))
                std::visit([&](auto member) { assign(config.*member, field.name, *node); },
                           field.member);
            else if (field.required)
                refuse(at(table.source()) + "[model] lacks the key '" + field.name + "'");
        }
    }

    void refuse_unknown(const toml::table& table, const std::vector<std::string>& known,
                        const std::string& place) const {
        for (const auto& [key, node] : table) {
            const std::string name(key.str());
            if (std::find(known.begin(), known.end(), name) == known.end())
                refuse(at(key.source()) + "unknown key " + in_quotes(name) + " " + place +
                       suggestion(name, known));
        }
    }

private:
    [[noreturn]] void wrong_type(const char* key, const toml::node& node, const char* want) const {
        std::ostringstream type;
        type << node.type();
        refuse(at(node.source()) + key + " must be " + want + ", not a value of type '" +
               type.str() + "'");
    }

    void assign(std::uint64_t& out, const char* key, const toml::node& node) const {
        const auto* value = node.as_integer();
        if (!value)
            wrong_type(key, node, "a whole number");
        if (value->get() < 0)
            refuse(at(node.source()) + key + " = " + std::to_string(value->get()) +
                   " must not be negative");
        out = static_cast<std::uint64_t>(value->get());
    }

    void assign(double& out, const char* key, const toml::node& node) const {
        if (const auto* real = node.as_floating_point())
            out = real->get();
        else if (const auto* whole = node.as_integer())
            out = static_cast<double>(whole->get());
        else
            wrong_type(key, node, "a number");
    }

    void assign(bool& out, const char* key, const toml::node& node) const {
        const auto* value = node.as_boolean();
        if (!value)
            wrong_type(key, node, "true or false");
        out = value->get();
    }

    template <class Enum>
        requires std::is_enum_v<Enum>
    void assign(Enum& out, const char* key, const toml::node& node) const {
        const auto* value = node.as_string();
        std::string all;
        for (std::size_t i = 0; i < kNames<Enum>.size(); ++i) {
            if (value && value->get() == kNames<Enum>[i]) {
                out = static_cast<Enum>(i);
                return;
            }
            all += (i == 0 ? "" : i + 1 == kNames<Enum>.size() ? " or " : ", ");
            all += in_quotes(kNames<Enum>[i]);
        }
        if (value)
            refuse(at(node.source()) + key + " = " + in_quotes(value->get()) + " must be " + all);
        wrong_type(key, node, all.c_str());
    }

    std::string source_;
};

toml::table parse_toml(std::string_view text, std::string_view source) {
    try {
        return toml::parse(text, source);
    } catch (const toml::parse_error& error) {
        refuse(std::string(source) + ":" + std::to_string(error.source().begin.line) + ": " +
               bounded(error.description()));
    }
}

struct Write {
    std::string operator()(std::uint64_t value) const { return number(value); }
    std::string operator()(double value) const { return number(value); }
    std::string operator()(bool value) const { return value ? "true" : "false"; }
    template <class Enum>
        requires std::is_enum_v<Enum>
    std::string operator()(Enum value) const {
        return '"' + std::string(name_of(value)) + '"';
    }
};

} // namespace

ModelConfig parse_model_config(std::string_view text, std::string_view source,
                               const std::vector<std::string>& other_tables) {
    const toml::table root = parse_toml(text, source);
    const Reader reader(source);
    std::vector<std::string> tables = other_tables;
    tables.insert(tables.begin(), "model");
    reader.refuse_unknown(root, tables, "at the top level");
    const toml::table* model = root["model"].as_table();
    if (!model)
        refuse(std::string(source) + ": has no table [model]");
    std::vector<std::string> keys;
    for (const Field& field : config_fields::all())
        keys.emplace_back(field.name);
    reader.refuse_unknown(*model, keys, "in [model]");

    ModelConfig config;
    reader.read(config, *model);
    check(config, [&](const char* key) {
        const toml::node* node = model->get(key);
        return reader.at(node ? node->source() : model->source());
    });
    return config;
}

ModelConfig load_model_config(const std::filesystem::path& file,
                              const std::vector<std::string>& other_tables) {
    constexpr std::size_t kMaxBytes = 1u << 20;
    std::error_code status;
    if (!std::filesystem::is_regular_file(file, status))
        throw Error(ErrorCode::Io, "cannot read " + file.string() + ": not a file");
    std::ifstream stream(file, std::ios::binary);
    std::string text(kMaxBytes + 1, '\0');
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (!stream.is_open() || stream.bad())
        throw Error(ErrorCode::Io, "cannot read " + file.string());
    text.resize(static_cast<std::size_t>(stream.gcount()));
    if (text.size() > kMaxBytes)
        refuse(file.string() + " is larger than 1 MiB: not a configuration");
    return parse_model_config(text, file.string(), other_tables);
}

std::string to_toml(const ModelConfig& config) {
    std::string text = "[model]\n";
    for (const Field& field : config_fields::all()) {
        text += std::string(field.name) + " = ";
        text += std::visit([&](auto member) { return Write()(config.*member); }, field.member);
        text += '\n';
    }
    return text;
}

} // namespace bellows
