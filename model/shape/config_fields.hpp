// SPDX-License-Identifier: MIT
#pragma once

// The keys of a configuration's [model] table: their fields, ranges and names of values.

#include <bellows/shape/config.hpp>

#include <array>
#include <functional>
#include <span>
#include <string>
#include <variant>

namespace bellows::config_fields {

// What a configuration calls the values of an enumeration, in their order.
template <class Enum>
inline constexpr std::array<const char*, 0> kNames{};
template <>
inline constexpr std::array kNames<ScoreFunction>{"sigmoid", "softmax"};
template <>
inline constexpr std::array kNames<GroupScore>{"auto", "max", "top_two"};
template <>
inline constexpr std::array kNames<BalanceLossKind>{"sequence", "expert", "micro_batch", "global"};
template <>
inline constexpr std::array kNames<CapacityOf>{"device", "expert"};
template <>
inline constexpr std::array kNames<AttentionKind>{"mla", "gqa"};
template <>
inline constexpr std::array kNames<RopeScaling>{"none", "yarn", "llama3"};

template <class Enum>
const char* name_of(Enum value) noexcept {
    return kNames<Enum>[static_cast<std::size_t>(value)];
}

// One row per key: the table drives reading, checking and writing.
struct Field {
    using Member =
        std::variant<std::uint64_t ModelConfig::*, double ModelConfig::*, bool ModelConfig::*,
                     ScoreFunction ModelConfig::*, GroupScore ModelConfig::*,
                     BalanceLossKind ModelConfig::*, CapacityOf ModelConfig::*,
                     AttentionKind ModelConfig::*, RopeScaling ModelConfig::*>;
    const char* name;
    Member member;
    bool required = false;
    double min = 0; ///< numbers lie in [min, max]
    double max = 0;
    std::uint64_t multiple = 1; ///< 8 for what kernels read in 16-byte pieces
};

std::span<const Field> all();

/// Throws Error{InvalidArgument} with the message, made one line whatever the text held: quoted
/// TOML keys may contain control characters.
[[noreturn]] void refuse(std::string message);

/// The shortest text that reads back as the same double and looks like one ("1.0", not "1").
std::string number(double value);
std::string number(std::uint64_t value);

/// Gives "file:line: " for a key, or nothing for a configuration that was not read from a text.
using Locate = std::function<std::string(const char* key)>;

/// Every number against its range and against the others.
void check(const ModelConfig& config, const Locate& where);

} // namespace bellows::config_fields
