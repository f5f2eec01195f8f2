// SPDX-License-Identifier: MIT
#include <bellows/engine/device_choice.hpp>

#include <bellows/base/error.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iomanip>
#include <sstream>

namespace bellows {

namespace {

/// "" where there is no home.
std::string pipeline_cache_file(const std::string& device) {
    std::filesystem::path folder;
    if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != 0)
        folder = cache;
    else if (const char* home = std::getenv("HOME"); home != nullptr && *home != 0)
        folder = std::filesystem::path(home) / ".cache";
    else
        return "";
    return folder / "bellows" / ("pipelines-" + (device.empty() ? "any" : device) + ".bin");
}

bool is_uuid(std::string_view text) {
    std::size_t digits = 0;
    for (const char c : text) {
        const bool hex = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
        if (!hex && c != '-') {
            return false;
        }
        digits += hex;
    }
    return digits == 32;
}

std::string kind_of(const DeviceInfo& info) {
    return info.is_cpu ? "cpu" : "gpu";
}

} // namespace

std::vector<std::string> parse_devices(std::string_view text) {
    std::vector<std::string> devices;
    std::string item;
    std::istringstream items{std::string(text)};
    while (std::getline(items, item, ',')) {
        const bool index = !item.empty() && item.size() <= 4 &&
                           item.find_first_not_of("0123456789") == std::string::npos;
        if (!index && item != "gpu" && item != "cpu" && item != kAnyDevice && !is_uuid(item)) {
            throw Error(ErrorCode::InvalidArgument,
                        "device " + in_quotes(item) +
                            " is not \"any\", \"gpu\", \"cpu\", an index or a UUID");
        }
        devices.push_back(item);
    }
    if (devices.empty() || text.ends_with(',')) {
        throw Error(ErrorCode::InvalidArgument,
                    "the list of devices " + in_quotes(text) + " has an empty entry");
    }
    return devices;
}

std::string device_table() {
    std::ostringstream out;
    const auto line = [&](const std::string& index, const std::string& kind,
                          const std::string& uuid, const std::string& name,
                          const std::string& driver) {
        out << std::left << std::setw(7) << index << std::setw(6) << kind << std::setw(34) << uuid
            << std::setw(40) << name << driver << "\n";
    };
    line("index", "kind", "UUID", "name", "driver");
    const std::vector<DeviceInfo> devices = list_devices();
    for (const DeviceInfo& info : devices) {
        std::string lacks;
        for (const std::string& unmet : info.unmet_requirements)
            lacks += (lacks.empty() ? " (cannot serve, it lacks " : ", ") + unmet;
        line(std::to_string(info.index), kind_of(info), info.uuid, info.name,
             info.driver + (lacks.empty() ? "" : lacks + ")"));
    }
    if (devices.empty())
        out << "there is no Vulkan device; mesa-vulkan-drivers has one for the CPU\n";
    std::string text = out.str();
    text.pop_back();
    return text;
}

std::string device_names() {
    std::string text;
    try {
        for (const DeviceInfo& info : list_devices())
            text += (text.empty() ? "" : ", ") + std::to_string(info.index) + " (" + kind_of(info) +
                    ", " + info.name + ")";
    } catch (const Error&) {
        return "none"; // no loader: this is for the error that came first
    }
    return text.empty() ? "none" : text;
}

std::string uuid_in_turn(const std::vector<DeviceInfo>& all, int local_rank) {
    const auto serves = [](const DeviceInfo& info) {
        return !info.is_cpu && info.unmet_requirements.empty();
    };
    const auto best = std::ranges::find_if(all, serves);
    std::vector<std::string> alike;
    for (auto info = best; info != all.end(); ++info)
        if (serves(*info) && info->name == best->name)
            alike.push_back(info->uuid);
    return alike.size() < 2 ? "" : alike[static_cast<std::size_t>(local_rank) % alike.size()];
}

DeviceOptions device_options_of_rank(const std::string& devices, int local_rank) {
    DeviceOptions options = DeviceOptions::from_environment({});
    const std::vector<std::string> list = parse_devices(devices);
    const std::string& device = list[static_cast<std::size_t>(local_rank) % list.size()];
    if (device != kAnyDevice) // what the command says goes before BELLOWS_DEVICE
        options.select = device;
    if (options.select.empty() || options.select == "gpu")
        if (const std::string uuid = uuid_in_turn(list_devices(), local_rank); !uuid.empty())
            options.select = uuid;
    options.pipeline_cache_file = pipeline_cache_file(options.select);
    return options;
}

} // namespace bellows
