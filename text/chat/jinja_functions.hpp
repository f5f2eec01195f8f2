// SPDX-License-Identifier: MIT
#pragma once

// Filters, tests, methods and operators of templates. They throw Error{Unsupported} with the line
// for what they do not know, and for values that they do not take.

#include "jinja_limits.hpp"
#include "jinja_value.hpp"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bellows::text::jinja {

struct Arguments {
    std::vector<Value> values;
    std::vector<std::pair<std::string, Value>> named;

    /// By place or by name; undefined: neither.
    Value get(std::size_t place, std::string_view name) const;
};

struct Context {
    Limits& limits;
    int line;
};

Value filter(const std::string& name, const Value& value, const Arguments& arguments, Context in);
bool test(const std::string& name, const Value& value, const Arguments& arguments, Context in);
/// Of strings and dictionaries. False: they have no such method.
bool method(const std::string& name, const Value& self, const Arguments& arguments, Context in,
            Value& result);
Value binary(const std::string& name, const Value& a, const Value& b, Context in);
bool equal(const Value& a, const Value& b, Context in);
bool contains(const Value& whole, const Value& part, Context in);

/// As "{{ value }}" prints it.
MarkedText printed(const Value& value, Context in);
std::int64_t integer(const Value& value, Context in);
const MarkedText& text_of(const Value& value, Context in);
/// What a loop runs over: the keys of a dictionary.
List items_of(const Value& value, Context in);
Value index(const Value& value, const Value& at, Context in);
Value slice(const Value& value, const Value& first, const Value& end, const Value& step,
            Context in);

} // namespace bellows::text::jinja
