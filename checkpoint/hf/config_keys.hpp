// SPDX-License-Identifier: MIT
#pragma once

// The keys of one object of a config.json: each is taken once, and what nobody has taken shows.

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

class ConfigKeys {
public:
    /// source: stands in front of errors. path: in front of keys, "" or "rope_scaling.".
    /// The object must outlive this.
    ConfigKeys(const nlohmann::json& object, std::string source, std::string path = {});

    /// Whether the key is there, be it null. Does not take it.
    bool stands(const std::string& key) const { return object_->contains(key); }
    /// Whether the key is there and not null. This and what follows take it.
    bool has(const std::string& key);
    std::optional<std::uint64_t> count(const std::string& key);
    std::optional<double> real(const std::string& key);
    std::optional<bool> flag(const std::string& key);
    std::optional<std::string> text(const std::string& key);
    /// Whole numbers: one, or a list of them; empty where the key is absent or null.
    std::vector<std::uint64_t> counts(const std::string& key);
    std::vector<std::string> texts(const std::string& key);
    /// An object, or null where the key is absent or null.
    const nlohmann::json* object(const std::string& key);

    /// Throws unless the key is absent, null or `value`. why: what Bellows does.
    void require(const std::string& key, const nlohmann::json& value, const std::string& why);

    const std::set<std::string>& taken() const noexcept { return taken_; }
    /// Gives the keys that are there and have not been taken, sorted.
    std::vector<std::string> rest() const;
    /// Throws Error{InvalidArgument}: "<source>: <key> = <value> <problem>".
    [[noreturn]] void refuse(const std::string& key, const std::string& problem) const;
    const std::string& source() const noexcept { return source_; }

private:
    const nlohmann::json* take(const std::string& key);

    const nlohmann::json* object_;
    std::string source_;
    std::string path_;
    std::set<std::string> taken_;
};

} // namespace bellows
