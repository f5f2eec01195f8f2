// SPDX-License-Identifier: MIT
#include "jinja_functions.hpp"

#include "jinja_lexer.hpp"
#include "jinja_strings.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

namespace bellows::text::jinja {

namespace {

[[noreturn]] void wrong_kind(const Value& value, const char* wanted, Context in) {
    refuse(in.line, std::string("a value of the kind ") + kind_of(value) + " where " + wanted +
                        " should stand");
}

Value text(MarkedText made, Context in) {
    in.limits.bytes(made.text.size(), in.line);
    return Value::text(std::move(made));
}

Value list(List made, Context in) {
    in.limits.bytes(made.size() * sizeof(Value), in.line);
    return Value::list(std::move(made));
}

Value texts(std::vector<MarkedText> parts, Context in) {
    List made;
    for (MarkedText& part : parts) {
        made.push_back(text(std::move(part), in));
    }
    return list(std::move(made), in);
}

/// What an argument strips or splits by: nothing, if it is absent or none.
std::string characters_of(const Value& value, Context in) {
    return value.is<Undefined>() || value.is<None>() ? "" : text_of(value, in).text;
}

std::int64_t length(const Value& value, Context in) {
    if (const MarkedText* found = value.as_text()) {
        in.limits.bytes(found->text.size(), in.line);
        return static_cast<std::int64_t>(character_places(found->text).size()) - 1;
    }
    if (const auto* dict = value.as_dict()) {
        return static_cast<std::int64_t>((*dict)->entries.size());
    }
    return static_cast<std::int64_t>(items_of(value, in).size());
}

/// JSON as Python writes it, with ", " and ": ".
void append_json(MarkedText& out, const Value& value, int depth, Context in) {
    constexpr int kDeepest = 32;
    if (depth > kDeepest) {
        refuse(in.line, "JSON that is nested too deeply");
    }
    const auto own = [&](std::string_view plain) { out.append(MarkedText::of_template(plain)); };
    in.limits.step(in.line);
    if (const MarkedText* found = value.as_text()) {
        own("\"");
        for (std::size_t i = 0; i < found->text.size(); ++i) {
            const char c = found->text[i];
            constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f";
            if (const std::size_t at = kEscaped.find(c); at != std::string_view::npos) {
                const std::string both = {'\\', "\"\\nrtbf"[at]};
                out.append({both, std::string(2, found->own[i])});
            } else if (static_cast<unsigned char>(c) < 0x20) {
                constexpr const char* kHex = "0123456789abcdef";
                const std::string code = {'\\', 'u', '0', '0', kHex[c >> 4], kHex[c & 15]};
                out.append({code, std::string(code.size(), found->own[i])});
            } else {
                out.append(found->part(i, 1));
            }
        }
        own("\"");
    } else if (const List* items = value.as_list()) {
        own("[");
        for (std::size_t i = 0; i < items->size(); ++i) {
            own(i == 0 ? "" : ", ");
            append_json(out, (*items)[i], depth + 1, in);
        }
        own("]");
    } else if (const auto* dict = value.as_dict()) {
        own("{");
        for (std::size_t i = 0; i < (*dict)->entries.size(); ++i) {
            own(i == 0 ? "" : ", ");
            append_json(out, Value::text(MarkedText::of_template((*dict)->entries[i].first)),
                        depth + 1, in);
            own(": ");
            append_json(out, (*dict)->entries[i].second, depth + 1, in);
        }
        own("}");
    } else if (value.is<None>()) {
        own("null");
    } else if (const auto* flag = std::get_if<bool>(&value.as)) {
        own(*flag ? "true" : "false");
    } else {
        out.append(printed(value, in));
    }
    in.limits.bytes(1, in.line);
}

Value joined(const Value& value, const Arguments& arguments, Context in) {
    const Value separator = arguments.get(0, "d");
    const MarkedText between = separator.is<Undefined>() ? MarkedText() : text_of(separator, in);
    MarkedText out;
    bool first = true;
    for (const Value& item : items_of(value, in)) {
        if (!first) {
            out.append(between);
        }
        out.append(printed(item, in));
        in.limits.bytes(between.text.size(), in.line);
        first = false;
    }
    return text(std::move(out), in);
}

Value pairs_of(const Value& value, Context in) {
    const auto* dict = value.as_dict();
    if (dict == nullptr) {
        wrong_kind(value, "a dictionary", in);
    }
    List pairs;
    for (const auto& [key, entry] : (*dict)->entries) {
        pairs.push_back(Value::list({Value::text(MarkedText::of_template(key)), entry}));
    }
    return list(std::move(pairs), in);
}

Value selected(const std::string& name, const Value& value, const Arguments& arguments,
               Context in) {
    const Value key = arguments.get(0, "");
    const std::string attribute = text_of(key, in).text;
    Arguments rest;
    std::string by = "truth";
    if (arguments.values.size() > 1) {
        by = text_of(arguments.values[1], in).text;
        rest.values.assign(arguments.values.begin() + 2, arguments.values.end());
    }
    List out;
    for (const Value& item : items_of(value, in)) {
        const Value found = index(item, key, in);
        const bool is = by == "truth" ? found.truth() : test(by, found, rest, in);
        if (is == (name == "selectattr")) {
            out.push_back(item);
        }
    }
    return list(std::move(out), in);
}

Value whole_number(const Value& value, Context in) {
    if (const MarkedText* found = value.as_text()) {
        std::int64_t number = 0;
        std::from_chars(found->text.data(), found->text.data() + found->text.size(), number);
        return Value(number);
    }
    if (const auto* real = std::get_if<double>(&value.as)) {
        constexpr double kMost = 9e15;
        return Value(static_cast<std::int64_t>(std::clamp(*real, -kMost, kMost)));
    }
    return Value(value.is<Undefined>() || value.is<None>() ? 0 : integer(value, in));
}

} // namespace

Value Arguments::get(std::size_t place, std::string_view name) const {
    for (const auto& [key, value] : named) {
        if (key == name) {
            return value;
        }
    }
    return place < values.size() ? values[place] : Value();
}

Value filter(const std::string& name, const Value& value, const Arguments& arguments, Context in) {
    if (name == "trim") {
        return text(
            stripped(printed(value, in), Side::Both, characters_of(arguments.get(0, "chars"), in)),
            in);
    }
    if (name == "length" || name == "count") {
        return Value(length(value, in));
    }
    if (name == "tojson") {
        if (!arguments.get(0, "indent").is<Undefined>() && !arguments.get(0, "indent").is<None>()) {
            refuse(in.line, "tojson with an indent");
        }
        MarkedText out;
        append_json(out, value, 0, in);
        return text(std::move(out), in);
    }
    if (name == "default" || name == "d") {
        const bool empty_counts = arguments.get(1, "boolean").truth();
        const bool absent = value.is<Undefined>() || (empty_counts && !value.truth());
        const Value other = arguments.get(0, "default_value");
        return !absent ? value : other.is<Undefined>() ? Value::text({}) : other;
    }
    if (name == "string" || name == "safe") {
        return value.as_text() != nullptr ? value : text(printed(value, in), in);
    }
    if (name == "upper" || name == "lower") {
        MarkedText changed = printed(value, in);
        return text(name == "upper" ? in_upper_case(std::move(changed))
                                    : in_lower_case(std::move(changed)),
                    in);
    }
    if (name == "capitalize") {
        const MarkedText lower = in_lower_case(printed(value, in));
        MarkedText out = in_upper_case(lower.part(0, std::min<std::size_t>(1, lower.text.size())));
        out.append(lower.part(std::min<std::size_t>(1, lower.text.size())));
        return text(std::move(out), in);
    }
    if (name == "replace") {
        Value out;
        method(name, text(printed(value, in), in), arguments, in, out);
        return out;
    }
    if (name == "join") {
        return joined(value, arguments, in);
    }
    if (name == "first" || name == "last") {
        const List items = items_of(value, in);
        return items.empty() ? Value() : name == "first" ? items.front() : items.back();
    }
    if (name == "list") {
        return list(items_of(value, in), in);
    }
    if (name == "reverse") {
        return slice(value, Value(), Value(), Value(std::int64_t{-1}), in);
    }
    if (name == "items") {
        return value.is<Undefined>() ? Value::list({}) : pairs_of(value, in);
    }
    if (name == "int") {
        return whole_number(value, in);
    }
    if (name == "selectattr" || name == "rejectattr") {
        return selected(name, value, arguments, in);
    }
    if (name == "map" && !arguments.get(~std::size_t{0}, "attribute").is<Undefined>()) {
        List out;
        for (const Value& item : items_of(value, in)) {
            out.push_back(index(item, arguments.get(~std::size_t{0}, "attribute"), in));
        }
        return list(std::move(out), in);
    }
    refuse(in.line, "the filter " + in_quotes(name));
}

bool test(const std::string& name, const Value& value, const Arguments& arguments, Context in) {
    const bool is_number = value.is<std::int64_t>() || value.is<double>();
    if (name == "defined" || name == "undefined") {
        return value.is<Undefined>() == (name == "undefined");
    }
    if (name == "none") {
        return value.is<None>();
    }
    if (name == "string") {
        return value.as_text() != nullptr;
    }
    if (name == "mapping") {
        return value.as_dict() != nullptr;
    }
    if (name == "sequence" || name == "iterable") {
        return value.as_text() != nullptr || value.as_list() != nullptr ||
               value.as_dict() != nullptr || value.is<Undefined>();
    }
    if (name == "boolean") {
        return value.is<bool>();
    }
    if (name == "true" || name == "false") {
        const bool* flag = std::get_if<bool>(&value.as);
        return flag != nullptr && *flag == (name == "true");
    }
    if (name == "number") {
        return is_number || value.is<bool>();
    }
    if (name == "integer" || name == "float") {
        return name == "integer" ? value.is<std::int64_t>() : value.is<double>();
    }
    if (name == "even" || name == "odd") {
        return (integer(value, in) % 2 == 0) == (name == "even");
    }
    if (name == "equalto" || name == "eq") {
        return equal(value, arguments.get(0, ""), in);
    }
    if (name == "in") {
        return contains(arguments.get(0, ""), value, in);
    }
    refuse(in.line, "the test " + in_quotes(name));
}

bool method(const std::string& name, const Value& self, const Arguments& arguments, Context in,
            Value& result) {
    if (const auto* dict = self.as_dict()) {
        if (name == "items") {
            result = pairs_of(self, in);
        } else if (name == "keys" || name == "values") {
            List out;
            for (const auto& [key, value] : (*dict)->entries) {
                out.push_back(name == "keys" ? Value::text(MarkedText::of_template(key)) : value);
            }
            result = list(std::move(out), in);
        } else if (name == "get") {
            const Value found = index(self, arguments.get(0, "key"), in);
            const Value other = arguments.get(1, "default");
            result = !found.is<Undefined>() ? found : other.is<Undefined>() ? Value(None()) : other;
        } else {
            return false;
        }
        return true;
    }
    const MarkedText* string = self.as_text();
    if (string == nullptr) {
        return false;
    }
    in.limits.bytes(string->text.size(), in.line);
    const Value first = arguments.get(0, "");
    if (name == "strip" || name == "lstrip" || name == "rstrip") {
        const Side side = name == "strip"    ? Side::Both
                          : name == "lstrip" ? Side::Left
                                             : Side::Right;
        result = text(stripped(*string, side, characters_of(first, in)), in);
    } else if (name == "split" || name == "rsplit") {
        const Value most = arguments.get(1, "maxsplit");
        result = texts(split(*string, characters_of(arguments.get(0, "sep"), in),
                             most.is<Undefined>() ? -1 : integer(most, in), name == "rsplit"),
                       in);
    } else if (name == "startswith" || name == "endswith") {
        List options;
        if (first.as_list() != nullptr) {
            options = *first.as_list();
        } else {
            options.push_back(first);
        }
        result = Value(std::any_of(options.begin(), options.end(), [&](const Value& option) {
            const std::string& part = text_of(option, in).text;
            return name == "startswith" ? string->text.starts_with(part)
                                        : string->text.ends_with(part);
        }));
    } else if (name == "replace") {
        const std::string& what = text_of(first, in).text;
        if (what.empty()) {
            refuse(in.line, "the replacement of nothing");
        }
        const MarkedText& by = text_of(arguments.get(1, ""), in);
        in.limits.bytes(string->text.size() / what.size() * by.text.size(), in.line);
        result = text(replaced(*string, what, by), in);
    } else if (name == "upper" || name == "lower") {
        result = text(name == "upper" ? in_upper_case(*string) : in_lower_case(*string), in);
    } else if (name == "join") {
        Arguments separator;
        separator.values.push_back(self);
        result = joined(first, separator, in);
    } else if (name == "find") {
        const std::size_t at = string->text.find(text_of(first, in).text);
        result = Value(at == std::string::npos
                           ? std::int64_t{-1}
                           : static_cast<std::int64_t>(
                                 character_places(string->text.substr(0, at)).size() - 1));
    } else {
        return false;
    }
    return true;
}

const MarkedText& text_of(const Value& value, Context in) {
    if (const MarkedText* found = value.as_text()) {
        return *found;
    }
    wrong_kind(value, "a string", in);
}

std::int64_t integer(const Value& value, Context in) {
    if (const auto* number = std::get_if<std::int64_t>(&value.as)) {
        return *number;
    }
    if (const auto* flag = std::get_if<bool>(&value.as)) {
        return *flag ? 1 : 0;
    }
    wrong_kind(value, "a whole number", in);
}

} // namespace bellows::text::jinja
