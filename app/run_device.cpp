// SPDX-License-Identifier: MIT
#include "app/run_device.hpp"

#include "app/train_config.hpp"

#include <cstdlib>
#include <filesystem>

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

} // namespace

DeviceOptions run_device_options(const std::string& devices, int local_rank) {
    const std::vector<std::string> list = parse_devices(devices);
    DeviceOptions options;
    options.select = list[static_cast<std::size_t>(local_rank) % list.size()];
    options.pipeline_cache_file = pipeline_cache_file(options.select);
    return DeviceOptions::from_environment(options);
}

} // namespace bellows
