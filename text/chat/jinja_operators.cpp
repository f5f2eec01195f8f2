// SPDX-License-Identifier: MIT
#include "jinja_functions.hpp"
#include "jinja_lexer.hpp"
#include "jinja_strings.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <cmath>

namespace bellows::text::jinja {

namespace {

[[noreturn]] void not_for(const std::string& name, const Value& a, const Value& b, Context in) {
    refuse(in.line, in_quotes(name) + " of " + kind_of(a) + " and " + kind_of(b));
}

bool as_number(const Value& value, double& out) {
    if (const auto* whole = std::get_if<std::int64_t>(&value.as)) {
        out = static_cast<double>(*whole);
    } else if (const auto* real = std::get_if<double>(&value.as)) {
        out = *real;
    } else if (const auto* flag = std::get_if<bool>(&value.as)) {
        out = *flag ? 1 : 0;
    } else {
        return false;
    }
    return true;
}

Value of_whole(const std::string& name, std::int64_t a, std::int64_t b, Context in) {
    std::int64_t out = 0;
    bool overflow = false;
    if (name == "+") {
        overflow = __builtin_add_overflow(a, b, &out);
    } else if (name == "-") {
        overflow = __builtin_sub_overflow(a, b, &out);
    } else if (name == "*") {
        overflow = __builtin_mul_overflow(a, b, &out);
    } else if (b == 0 || b == -1) {
        overflow = b == 0 || __builtin_sub_overflow(std::int64_t{0}, a, &out);
        out = name == "%" ? 0 : out;
    } else { // towards minus infinity, as Python
        out = a / b - ((a % b != 0) && ((a < 0) != (b < 0)) ? 1 : 0);
        out = name == "%" ? a - out * b : out;
    }
    if (overflow) {
        refuse(in.line, in_quotes(name) + " leaves the whole numbers");
    }
    return Value(out);
}

Value arithmetic(const std::string& name, const Value& a, const Value& b, Context in) {
    double x = 0;
    double y = 0;
    if (!as_number(a, x) || !as_number(b, y)) {
        not_for(name, a, b, in);
    }
    if (name != "/" && !a.is<double>() && !b.is<double>()) {
        return of_whole(name, integer(a, in), integer(b, in), in);
    }
    if (y == 0 && name != "+" && name != "-" && name != "*") {
        refuse(in.line, "a division by zero");
    }
    return Value(name == "+"    ? x + y
                 : name == "-"  ? x - y
                 : name == "*"  ? x * y
                 : name == "/"  ? x / y
                 : name == "//" ? std::floor(x / y)
                                : x - std::floor(x / y) * y);
}

bool less(const std::string& name, const Value& a, const Value& b, Context in) {
    double x = 0;
    double y = 0;
    if (as_number(a, x) && as_number(b, y)) {
        return x < y;
    }
    if (a.as_text() == nullptr || b.as_text() == nullptr) {
        not_for(name, a, b, in);
    }
    return a.as_text()->text < b.as_text()->text;
}

/// Python's places of a slice.
struct Range {
    std::int64_t first, end, step;
};

Range range_of(const Value& first, const Value& end, const Value& step, std::int64_t length,
               Context in) {
    const auto absent = [](const Value& value) {
        return value.is<Undefined>() || value.is<None>();
    };
    Range range{0, 0, absent(step) ? 1 : integer(step, in)};
    if (range.step == 0) {
        refuse(in.line, "a slice with the step 0");
    }
    const bool back = range.step < 0;
    const auto place = [&](const Value& value, std::int64_t otherwise) {
        if (absent(value)) {
            return otherwise;
        }
        std::int64_t at = integer(value, in);
        at = at < 0 ? std::max(at, -length - 1) + length : at;
        return std::clamp(at, back ? std::int64_t{-1} : 0, back ? length - 1 : length);
    };
    range.first = place(first, back ? length - 1 : 0);
    range.end = place(end, back ? -1 : length);
    return range;
}

template <class Take>
void each(const Range& range, Take&& take) {
    for (std::int64_t at = range.first; range.step > 0 ? at < range.end : at > range.end;) {
        take(static_cast<std::size_t>(at));
        if (__builtin_add_overflow(at, range.step, &at)) {
            break;
        }
    }
}

} // namespace

bool equal(const Value& a, const Value& b, Context in) {
    in.limits.step(in.line);
    double left = 0;
    double right = 0;
    if (as_number(a, left) && as_number(b, right)) {
        return left == right;
    }
    if (a.as.index() != b.as.index()) {
        return false;
    }
    if (const MarkedText* text = a.as_text()) {
        return text->text == b.as_text()->text;
    }
    if (const List* list = a.as_list()) {
        const List& other = *b.as_list();
        return std::equal(list->begin(), list->end(), other.begin(), other.end(),
                          [&](const Value& x, const Value& y) { return equal(x, y, in); });
    }
    if (const auto* dict = a.as_dict()) {
        const Dict& other = **b.as_dict();
        return dict->get() == &other ||
               ((*dict)->entries.size() == other.entries.size() && !other.is_namespace &&
                std::all_of((*dict)->entries.begin(), (*dict)->entries.end(),
                            [&](const auto& entry) {
                                const Value* found = other.find(entry.first);
                                return found != nullptr && equal(entry.second, *found, in);
                            }));
    }
    return a.is<Undefined>() || a.is<None>();
}

Value binary(const std::string& name, const Value& a, const Value& b, Context in) {
    if (name == "==" || name == "!=") {
        return Value(equal(a, b, in) == (name == "=="));
    }
    if (name == "<" || name == ">=") {
        return Value(less(name, a, b, in) == (name == "<"));
    }
    if (name == ">" || name == "<=") {
        return Value(less(name, b, a, in) == (name == ">"));
    }
    if (name == "in" || name == "not in") {
        return Value(contains(b, a, in) == (name == "in"));
    }
    const bool texts = a.as_text() != nullptr && b.as_text() != nullptr;
    if (name == "~" || (name == "+" && texts)) {
        MarkedText out = printed(a, in);
        out.append(printed(b, in));
        in.limits.bytes(out.text.size(), in.line);
        return Value::text(std::move(out));
    }
    if (name == "+" && a.as_list() != nullptr && b.as_list() != nullptr) {
        List out = *a.as_list();
        out.insert(out.end(), b.as_list()->begin(), b.as_list()->end());
        in.limits.bytes(out.size() * sizeof(Value), in.line);
        return Value::list(std::move(out));
    }
    return arithmetic(name, a, b, in);
}

bool contains(const Value& whole, const Value& part, Context in) {
    if (const MarkedText* text = whole.as_text()) {
        in.limits.bytes(text->text.size(), in.line);
        return text->text.find(text_of(part, in).text) != std::string::npos;
    }
    if (const auto* dict = whole.as_dict()) {
        return part.as_text() != nullptr && (*dict)->find(part.as_text()->text) != nullptr;
    }
    const List items = items_of(whole, in);
    return std::any_of(items.begin(), items.end(),
                       [&](const Value& item) { return equal(item, part, in); });
}

MarkedText printed(const Value& value, Context in) {
    if (const MarkedText* text = value.as_text()) {
        return *text;
    }
    if (value.is<Undefined>()) {
        return {};
    }
    if (value.is<None>()) {
        return MarkedText::of_template("None");
    }
    if (const auto* flag = std::get_if<bool>(&value.as)) {
        return MarkedText::of_template(*flag ? "True" : "False");
    }
    if (const auto* number = std::get_if<std::int64_t>(&value.as)) {
        return MarkedText::of_template(std::to_string(*number));
    }
    refuse(in.line, std::string("a ") + kind_of(value) + " as text");
}

List items_of(const Value& value, Context in) {
    List items;
    if (const List* list = value.as_list()) {
        items = *list;
    } else if (const auto* dict = value.as_dict()) {
        for (const auto& [key, entry] : (*dict)->entries) {
            items.push_back(Value::text(MarkedText::of_template(key)));
        }
    } else if (const MarkedText* text = value.as_text()) {
        const std::vector<std::size_t> places = character_places(text->text);
        in.limits.bytes(places.size() * sizeof(Value), in.line);
        for (std::size_t i = 0; i + 1 < places.size(); ++i) {
            items.push_back(Value::text(text->part(places[i], places[i + 1] - places[i])));
        }
    } else if (!value.is<Undefined>()) {
        refuse(in.line, std::string("a loop over a value of the kind ") + kind_of(value));
    }
    in.limits.bytes(items.size() * sizeof(Value), in.line);
    return items;
}

Value index(const Value& value, const Value& at, Context in) {
    if (const auto* dict = value.as_dict()) {
        const MarkedText* key = at.as_text();
        const Value* found = key == nullptr ? nullptr : (*dict)->find(key->text);
        return found == nullptr ? Value() : *found;
    }
    if (value.is<Undefined>() || value.is<None>()) {
        if (value.is<None>()) {
            return Value();
        }
        refuse(in.line, "a part of a value that is not defined");
    }
    if (!at.is<std::int64_t>() || (value.as_list() == nullptr && value.as_text() == nullptr)) {
        return Value();
    }
    std::int64_t place = integer(at, in);
    if (const List* list = value.as_list()) {
        const auto length = static_cast<std::int64_t>(list->size());
        place += place < 0 ? length : 0;
        return place < 0 || place >= length ? Value() : (*list)[static_cast<std::size_t>(place)];
    }
    const List characters = items_of(value, in);
    return index(Value::list(characters), at, in);
}

Value slice(const Value& value, const Value& first, const Value& end, const Value& step,
            Context in) {
    if (const List* list = value.as_list()) {
        List out;
        each(range_of(first, end, step, static_cast<std::int64_t>(list->size()), in),
             [&](std::size_t at) { out.push_back((*list)[at]); });
        in.limits.bytes(out.size() * sizeof(Value), in.line);
        return Value::list(std::move(out));
    }
    const MarkedText& text = text_of(value, in);
    const std::vector<std::size_t> places = character_places(text.text);
    MarkedText out;
    each(range_of(first, end, step, static_cast<std::int64_t>(places.size()) - 1, in),
         [&](std::size_t at) { out.append(text.part(places[at], places[at + 1] - places[at])); });
    in.limits.bytes(text.text.size(), in.line);
    return Value::text(std::move(out));
}

} // namespace bellows::text::jinja
