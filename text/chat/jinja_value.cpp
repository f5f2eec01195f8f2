// SPDX-License-Identifier: MIT
#include "jinja_value.hpp"

#include <array>

namespace bellows::text::jinja {

const Value* Dict::find(std::string_view key) const {
    for (const auto& [name, value] : entries) {
        if (name == key) {
            return &value;
        }
    }
    return nullptr;
}

void Dict::set(const std::string& key, Value value) {
    for (auto& [name, old] : entries) {
        if (name == key) {
            old = std::move(value);
            return;
        }
    }
    entries.emplace_back(key, std::move(value));
}

const MarkedText* Value::as_text() const noexcept {
    const auto* found = std::get_if<std::shared_ptr<const MarkedText>>(&as);
    return found == nullptr ? nullptr : found->get();
}

const List* Value::as_list() const noexcept {
    const auto* found = std::get_if<std::shared_ptr<const List>>(&as);
    return found == nullptr ? nullptr : found->get();
}

const std::shared_ptr<Dict>* Value::as_dict() const noexcept {
    return std::get_if<std::shared_ptr<Dict>>(&as);
}

bool Value::truth() const noexcept {
    if (is<Undefined>() || is<None>()) {
        return false;
    }
    if (const auto* flag = std::get_if<bool>(&as)) {
        return *flag;
    }
    if (const auto* number = std::get_if<std::int64_t>(&as)) {
        return *number != 0;
    }
    if (const auto* number = std::get_if<double>(&as)) {
        return *number != 0;
    }
    if (const MarkedText* text = as_text()) {
        return !text->text.empty();
    }
    if (const List* list = as_list()) {
        return !list->empty();
    }
    if (const auto* dict = as_dict()) {
        return (*dict)->is_namespace || !(*dict)->entries.empty();
    }
    return true;
}

const char* kind_of(const Value& value) noexcept {
    constexpr std::array kKinds = {"undefined", "none", "bool", "int",      "float",
                                   "str",       "list", "dict", "function", "macro"};
    return kKinds[value.as.index()];
}

} // namespace bellows::text::jinja
