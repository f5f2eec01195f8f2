// SPDX-License-Identifier: MIT
#pragma once

// Tables of a TOML text as structs, field by field: reading, checking and writing follow one
// visitor, visit(key, field, least, most). For the house's own sources. Pure functions.

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>

#include <toml++/toml.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace bellows::toml_fields {

/// The largest whole number that TOML can hold.
inline constexpr std::uint64_t kAny = std::numeric_limits<std::int64_t>::max();

[[noreturn]] inline void refuse(const std::string& message) {
    throw Error(ErrorCode::InvalidArgument, message);
}

template <class T>
std::string printed(T value) {
    std::ostringstream out;
    out << value;
    return out.str();
}

/// Parses a text. Throws Error{InvalidArgument} with "source:line: ".
inline toml::table parse(std::string_view text, std::string_view source) {
    try {
        return toml::parse(text, source);
    } catch (const toml::parse_error& error) {
        refuse(std::string(source) + ":" + std::to_string(error.source().begin.line) + ": " +
               bounded(error.description()));
    }
}

/// Where a value stands: "source:line: ".
class Place {
public:
    explicit Place(std::string_view source) : source_(source) {}
    std::string of(const toml::node& node) const {
        return source_ + ":" + std::to_string(node.source().begin.line) + ": ";
    }

private:
    std::string source_;
};

inline void assign(std::uint64_t& out, const toml::node& node, const std::string& where) {
    const auto* value = node.as_integer();
    if (value == nullptr || value->get() < 0)
        refuse(where + " must be a whole number of at least 0");
    out = static_cast<std::uint64_t>(value->get());
}

inline void assign(double& out, const toml::node& node, const std::string& where) {
    // Not node.value<double>(), which is empty for whole numbers that no double equals.
    if (const auto* real = node.as_floating_point())
        out = real->get();
    else if (const auto* whole = node.as_integer())
        out = static_cast<double>(whole->get());
    else
        refuse(where + " must be a number");
}

inline void assign(bool& out, const toml::node& node, const std::string& where) {
    const auto* value = node.as_boolean();
    if (value == nullptr)
        refuse(where + " must be true or false");
    out = value->get();
}

inline void assign(std::string& out, const toml::node& node, const std::string& where) {
    const auto* value = node.as_string();
    if (value == nullptr)
        refuse(where + " must be a text in quotes");
    out = value->get();
}

inline void assign(std::vector<std::string>& out, const toml::node& node,
                   const std::string& where) {
    const auto* values = node.as_array();
    out.clear();
    if (values == nullptr) { // one path serves without brackets
        assign(out.emplace_back(), node, where);
        return;
    }
    for (const toml::node& value : *values)
        assign(out.emplace_back(), value, where);
}

template <class Number>
    requires std::is_arithmetic_v<Number>
void assign(std::vector<Number>& out, const toml::node& node, const std::string& where) {
    const auto* values = node.as_array();
    if (values == nullptr)
        refuse(where + " must be numbers in square brackets");
    out.clear();
    for (const toml::node& value : *values)
        assign(out.emplace_back(), value, where);
}

/// Enumerations and other values with to_text(value) and from_text(value, text), found by their
/// types; from_text throws Error{InvalidArgument}.
template <class T>
    requires requires(T& value, const std::string& text) { from_text(value, text); }
void assign(T& out, const toml::node& node, const std::string& where) {
    std::string text;
    assign(text, node, where);
    try {
        from_text(out, text);
    } catch (const Error& error) {
        refuse(where + " = " + error.message());
    }
}

/// toml++ writes 1e-08 as "1e-08" and 1.0 as "1.0": both come back as the same double.
template <class T>
void put(toml::table& table, const char* key, const T& value) {
    if constexpr (std::is_same_v<T, std::uint64_t>) {
        table.insert(key, static_cast<std::int64_t>(value));
    } else if constexpr (std::is_same_v<T, std::vector<std::uint64_t>>) {
        toml::array items;
        for (const std::uint64_t item : value)
            items.push_back(static_cast<std::int64_t>(item));
        table.insert(key, std::move(items));
    } else if constexpr (std::is_same_v<T, std::vector<std::string>> ||
                         std::is_same_v<T, std::vector<double>>) {
        toml::array items;
        for (const auto& item : value)
            items.push_back(item);
        table.insert(key, std::move(items));
    } else if constexpr (requires { to_text(value); }) {
        table.insert(key, std::string(to_text(value)));
    } else {
        table.insert(key, value);
    }
}

/// Refuses a number outside its range, NaN too. Other values have none.
template <class T, class Least, class Most>
void check_range(const char* key, const T& value, Least least, Most most) {
    if constexpr (std::is_arithmetic_v<T>) {
        const auto low = static_cast<T>(least), high = static_cast<T>(most);
        if (!(value >= low && value <= high))
            refuse(std::string(key) + " = " + printed(value) + " must be at least " + printed(low) +
                   (high < static_cast<T>(kAny) ? " and at most " + printed(high) : ""));
    }
}

} // namespace bellows::toml_fields
