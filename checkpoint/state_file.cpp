// SPDX-License-Identifier: MIT
#include "state_file.hpp"

#include "base/records/checked_json.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

namespace bellows {

namespace {

using Json = nlohmann::json;

/// Every version so far has written this format.
constexpr std::uint64_t kFormat = 1;
constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kLargestState = std::uint64_t{16} << 20;

std::uint64_t number(const Json& json, const char* key, std::uint64_t most) {
    const Json& value = json.at(key);
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > most) {
        throw Error(ErrorCode::Corrupt, std::string(key) + " is " + in_quotes(value.dump()));
    }
    return value.get<std::uint64_t>();
}

std::uint32_t small_number(const Json& json, const char* key) {
    return static_cast<std::uint32_t>(number(json, key, std::numeric_limits<std::uint32_t>::max()));
}

/// A name that stays inside the checkpoint's folder.
bool is_plain_name(const std::string& name) {
    return !name.empty() && name.front() != '.' && name.find('/') == std::string::npos &&
           name.find('\0') == std::string::npos;
}

/// Before anything else is looked at: a later format may even be summed otherwise.
void require_format(const Json& json) {
    const std::uint64_t format = number(json, "format", kAny);
    if (format > kFormat) {
        throw Error(ErrorCode::InvalidArgument,
                    "the checkpoint has format " + std::to_string(format) +
                        ", this program knows " + std::to_string(kFormat) +
                        "; use a newer Bellows");
    }
    if (format != kFormat) {
        throw Error(ErrorCode::Corrupt, "format is " + std::to_string(format));
    }
}

std::vector<double> loads_from_json(const Json& json, std::uint64_t layer) {
    auto loads = json.get<std::vector<double>>();
    for (const double load : loads)
        if (!std::isfinite(load) || load < 0)
            throw Error(ErrorCode::Corrupt, "a load of an expert of layer " +
                                                std::to_string(layer) + " is " +
                                                std::to_string(load));
    return loads;
}

ExpertPlaces experts_from_json(const Json& json) {
    ExpertPlaces places;
    for (const Json& one : json) {
        const std::uint64_t layer = number(one, "layer", kAny);
        const std::vector<double> loads = loads_from_json(one.at("loads"), layer);
        ExpertPlacement placement{.num_experts = loads.size(),
                                  .num_ranks = number(one, "ranks", kMostExpertSlots),
                                  .slots_of_rank = number(one, "slots", kMostExpertSlots),
                                  .expert_of_slot =
                                      one.at("expert_of_slot").get<std::vector<std::int32_t>>()};
        try {
            validate_for_exchange(placement);
        } catch (const Error& error) {
            throw Error(ErrorCode::Corrupt,
                        "the experts of layer " + std::to_string(layer) + ": " + error.message());
        }
        places.placements[layer] = std::move(placement);
        places.loads[layer] = loads;
        const auto placed_by = one.find("placed_by");
        if (placed_by == one.end())
            continue;
        places.placed_by[layer] = loads_from_json(*placed_by, layer);
        if (places.placed_by[layer].size() != loads.size())
            throw Error(ErrorCode::Corrupt, "layer " + std::to_string(layer) + " has " +
                                                std::to_string(loads.size()) +
                                                " experts, placed by loads of " +
                                                std::to_string(places.placed_by[layer].size()));
    }
    return places;
}

Json to_json(const ExpertPlaces& places) {
    Json all = Json::array();
    for (const auto& [layer, placement] : places.placements) {
        all.push_back({{"layer", layer},
                       {"ranks", placement.num_ranks},
                       {"slots", placement.slots_of_rank},
                       {"expert_of_slot", placement.expert_of_slot},
                       {"loads", places.loads.at(layer)}});
        if (const auto by = places.placed_by.find(layer); by != places.placed_by.end())
            all.back()["placed_by"] = by->second;
    }
    return all;
}

CheckpointState from_json(const Json& json, std::map<std::string, CheckpointFile>& files) {
    require_format(json);
    require_checksum(json);
    CheckpointState state;
    state.step = number(json, "step", kAny);
    state.seed = number(json, "seed", kAny);
    const Json& layout = json.at("layout");
    state.layout = {small_number(layout, "pp"), small_number(layout, "dp"),
                    small_number(layout, "ep")};
    if (const auto loss = json.find("loss"); loss != json.end())
        state.loss = loss->get<double>();
    state.kernels = json.at("kernels").get<std::map<std::string, std::string>>();
    if (const auto experts = json.find("experts"); experts != json.end())
        state.experts = experts_from_json(*experts);
    for (const auto& [name, file] : json.at("files").items()) {
        if (!is_plain_name(name)) {
            throw Error(ErrorCode::Corrupt, "it names the file " + in_quotes(name));
        }
        files[name] = {number(file, "bytes", kAny), small_number(file, "crc32")};
    }
    return state;
}

} // namespace

std::string format_checkpoint_state(const CheckpointState& state,
                                    const std::map<std::string, CheckpointFile>& files) {
    Json json = {
        {"format", kFormat},
        {"step", state.step},
        {"seed", state.seed},
        {"layout", {{"pp", state.layout.pp}, {"dp", state.layout.dp}, {"ep", state.layout.ep}}},
        {"kernels", state.kernels},
        {"files", Json::object()}};
    if (state.loss && std::isfinite(*state.loss))
        json["loss"] = *state.loss;
    if (!state.experts.placements.empty())
        json["experts"] = to_json(state.experts);
    for (const auto& [name, file] : files) {
        if (!is_plain_name(name)) {
            throw Error(ErrorCode::InvalidArgument,
                        "a checkpoint cannot hold a file named " + in_quotes(name));
        }
        json["files"][name] = {{"bytes", file.bytes}, {"crc32", file.checksum}};
    }
    return format_checked(std::move(json));
}

CheckpointState parse_checkpoint_state(const std::filesystem::path& path,
                                       std::map<std::string, CheckpointFile>& files) {
    const std::string text = read_file(path, kLargestState);
    const std::string file = in_quotes(path.string());
    try {
        return from_json(parse_shallow(text), files);
    } catch (const Json::exception&) {
        throw Error(ErrorCode::Corrupt, file + " is not the state of a checkpoint: a value is "
                                               "missing or of the wrong kind");
    } catch (const Error& error) {
        const bool corrupt = error.code() == ErrorCode::Corrupt;
        throw Error(error.code(), file + ": " + error.message() +
                                      (corrupt ? "; the checkpoint was damaged or changed" : ""));
    }
}

} // namespace bellows
