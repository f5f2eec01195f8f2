// SPDX-License-Identifier: MIT
#include <bellows/checkpoint/expert_tables.hpp>

#include "base/strict_json.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/shape/expert_placement.hpp>

namespace bellows {

std::vector<std::vector<std::int32_t>> parse_expert_tables(std::string_view text,
                                                           const std::string& name) {
    const std::string file = in_quotes(name);
    const auto refuse = [&](const std::string& place, const std::string& is,
                            const std::string& wanted) {
        throw Error(ErrorCode::InvalidArgument, file + ": " + place + " is " + is +
                                                    "; it must be " + wanted +
                                                    ", as `bellows plan experts --json` prints it");
    };
    const nlohmann::json json = parse_strict_object(text, file);
    const std::string key = "physical_to_logical";
    if (!json.contains(key))
        throw Error(ErrorCode::InvalidArgument,
                    file + " has no key \"" + key +
                        "\", which `bellows plan experts --json` prints");
    if (!json[key].is_array())
        refuse(key, json[key].type_name(), "an array of each layer's slots");
    std::vector<std::vector<std::int32_t>> tables;
    for (const nlohmann::json& layer : json[key]) {
        const std::string place = key + "[" + std::to_string(tables.size()) + "]";
        if (!layer.is_array())
            refuse(place, layer.type_name(), "an array of the expert in each slot");
        std::vector<std::int32_t>& table = tables.emplace_back();
        for (const nlohmann::json& slot : layer) {
            const std::string at = place + "[" + std::to_string(table.size()) + "]";
            const bool good = slot.is_number_unsigned()
                                  ? slot.get<std::uint64_t>() < kMostPlacedExperts
                                  : slot.is_number_integer() && slot == kFreeSlot;
            if (!good)
                refuse(at, slot.is_number() ? slot.dump() : slot.type_name(), "an expert or -1");
            table.push_back(slot.get<std::int32_t>());
        }
    }
    return tables;
}

std::vector<std::vector<std::int32_t>> read_expert_tables(const std::filesystem::path& file) {
    constexpr std::uint64_t kMostBytes = std::uint64_t{16} << 20;
    return parse_expert_tables(read_file(file, kMostBytes), file.string());
}

} // namespace bellows
