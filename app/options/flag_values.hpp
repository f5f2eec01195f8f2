// SPDX-License-Identifier: MIT
#pragma once

// Flags that override what a configuration says.

#include <bellows/base/error.hpp>

#include <optional>
#include <string>

namespace bellows {

template <class T>
void override_with(T& value, const std::optional<T>& flag) {
    if (flag) {
        value = *flag;
    }
}

/// Errors of a flag's value say which key it is for.
template <class Read>
void named(const char* key, Read read) {
    try {
        read();
    } catch (const Error& error) {
        throw Error(error.code(), std::string(key) + ": " + error.message());
    }
}

} // namespace bellows
