// SPDX-License-Identifier: MIT
#pragma once

// The values of a chat template. Strings remember which of their bytes the template wrote. One
// thread.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace bellows::text {

/// A text, and for each of its bytes '\1' if the template wrote it, '\0' if it came from outside.
struct MarkedText {
    std::string text;
    std::string own;

    static MarkedText of_template(std::string_view text) {
        return {std::string(text), std::string(text.size(), '\1')};
    }
    static MarkedText from_outside(std::string_view text) {
        return {std::string(text), std::string(text.size(), '\0')};
    }
    void append(const MarkedText& other) {
        text += other.text;
        own += other.own;
    }
    MarkedText part(std::size_t first, std::size_t bytes = std::string::npos) const {
        return {text.substr(first, bytes), own.substr(first, bytes)};
    }
};

namespace jinja {

struct Value;
struct Macro;
using List = std::vector<Value>;

struct Dict {
    std::vector<std::pair<std::string, Value>> entries; ///< in order
    bool is_namespace = false;                          ///< can be written to

    const Value* find(std::string_view key) const;
    void set(const std::string& key, Value value);
};

struct Undefined {};
struct None {};
/// A function of the interpreter.
struct Function {
    std::string name;
};

struct Value {
    std::variant<Undefined, None, bool, std::int64_t, double, std::shared_ptr<const MarkedText>,
                 std::shared_ptr<const List>, std::shared_ptr<Dict>, Function, const Macro*>
        as;

    Value() = default;
    template <class T>
    explicit Value(T value) : as(std::move(value)) {}
    static Value text(MarkedText text) {
        return Value(std::make_shared<const MarkedText>(std::move(text)));
    }
    static Value list(List list) { return Value(std::make_shared<const List>(std::move(list))); }

    template <class T>
    bool is() const noexcept {
        return std::holds_alternative<T>(as);
    }
    /// Null: of another kind.
    const MarkedText* as_text() const noexcept;
    const List* as_list() const noexcept;
    const std::shared_ptr<Dict>* as_dict() const noexcept;
    bool truth() const noexcept;
};

/// "str", "list" and so on, for messages.
const char* kind_of(const Value& value) noexcept;

} // namespace jinja

} // namespace bellows::text
