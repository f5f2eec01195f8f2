// SPDX-License-Identifier: MIT
#include <bellows/shape/presets.hpp>

#include "preset_table.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <filesystem>

namespace bellows {

std::vector<std::string> preset_names() {
    std::vector<std::string> names;
    for (const Preset& preset : preset_table())
        names.emplace_back(preset.name);
    std::ranges::sort(names); // "tiny" before "tiny-llama"
    return names;
}

std::string_view preset_text(std::string_view name) {
    for (const Preset& preset : preset_table())
        if (preset.name == name)
            return preset.text;
    throw Error(ErrorCode::InvalidArgument,
                "unknown preset " + in_quotes(name) + suggestion(name, preset_names()));
}

ModelConfig load_model(const std::string& preset_or_file,
                       const std::vector<std::string>& other_tables) {
    const std::vector<std::string> names = preset_names();
    if (std::find(names.begin(), names.end(), preset_or_file) != names.end())
        return parse_model_config(preset_text(preset_or_file), preset_or_file, other_tables);
    std::error_code status;
    if (std::filesystem::exists(preset_or_file, status))
        return load_model_config(preset_or_file, other_tables);
    std::string list;
    for (const std::string& name : names)
        list += (list.empty() ? "" : ", ") + name;
    throw Error(ErrorCode::InvalidArgument,
                in_quotes(preset_or_file) + " is neither a file nor a preset (" + list + ")");
}

} // namespace bellows
