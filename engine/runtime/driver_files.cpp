// SPDX-License-Identifier: MIT
#include "driver_files.hpp"

#include <bellows/base/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <vector>

#include <dlfcn.h>

namespace bellows::detail {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMostFiles = 8;       // that an error lists
constexpr std::size_t kLargest = 64 * 1024; // bytes of a manifest that are read

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::vector<fs::path> split(const std::string& text) {
    std::vector<fs::path> parts;
    std::istringstream all(text);
    for (std::string part; std::getline(all, part, ':');)
        if (!part.empty())
            parts.emplace_back(part);
    return parts;
}

/// Where the loader looks when no variable names the files.
std::vector<fs::path> usual_folders() {
    const std::string home = variable("HOME");
    const auto or_else = [](std::string value, const std::string& otherwise) {
        return value.empty() ? otherwise : value;
    };
    std::vector<fs::path> folders;
    const auto add = [&](const std::string& roots) {
        for (const fs::path& root : split(roots))
            folders.push_back(root / "vulkan" / "icd.d");
    };
    add(or_else(variable("XDG_CONFIG_HOME"), home.empty() ? "" : home + "/.config"));
    add(or_else(variable("XDG_CONFIG_DIRS"), "/etc/xdg"));
    add("/etc");
    add(or_else(variable("XDG_DATA_HOME"), home.empty() ? "" : home + "/.local/share"));
    add(or_else(variable("XDG_DATA_DIRS"), "/usr/local/share:/usr/share"));
    return folders;
}

/// A folder stands for the manifests in it.
std::vector<fs::path> manifests(const std::vector<fs::path>& paths) {
    std::vector<fs::path> files;
    for (const fs::path& path : paths) {
        std::error_code error;
        if (!fs::is_directory(path, error)) {
            files.push_back(path);
            continue;
        }
        const auto begin = files.size();
        for (fs::directory_iterator entry(path, error), end; !error && entry != end;
             entry.increment(error))
            if (entry->path().extension() == ".json")
                files.push_back(entry->path());
        std::sort(files.begin() + static_cast<std::ptrdiff_t>(begin), files.end());
    }
    return files;
}

std::string fault_of_library(const fs::path& library) {
    void* handle = ::dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* why = ::dlerror();
        return "its library does not load: " + in_quotes(why == nullptr ? "" : why);
    }
    ::dlclose(handle);
    return "its library loads but finds no device that it can use: the library's version may not "
           "fit the driver in the kernel, or this user may not open the device";
}

std::string fault_of(const fs::path& file) {
    std::error_code error;
    if (!fs::exists(file, error))
        return "there is no such file";
    std::ifstream stream(file, std::ios::binary);
    std::string text(kLargest, '\0');
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (!stream.is_open() || stream.bad())
        return "it cannot be read";
    text.resize(static_cast<std::size_t>(stream.gcount()));
    const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
    const nlohmann::json icd = json.is_object() ? json.value("ICD", nlohmann::json()) : json;
    if (!icd.is_object() || !icd.contains("library_path") || !icd["library_path"].is_string())
        return "it is no driver's manifest: it is not JSON with an ICD.library_path";
    fs::path library = icd["library_path"].get<std::string>();
    if (library.is_relative() && library.has_parent_path())
        library = file.parent_path() / library;
    return fault_of_library(library);
}

std::string list_of(const std::vector<fs::path>& files) {
    std::string text;
    for (std::size_t i = 0; i < std::min(files.size(), kMostFiles); ++i)
        text +=
            (i > 0 ? ", " : "") + in_quotes(files[i].string()) + " (" + fault_of(files[i]) + ")";
    if (files.size() > kMostFiles)
        text += " and " + std::to_string(files.size() - kMostFiles) + " more";
    return text;
}

} // namespace

std::string drivers_tried() {
    constexpr const char* kInstall = "install the GPU's driver, or mesa-vulkan-drivers, which has "
                                     "one for the CPU";
    std::string named_by;
    for (const char* name : {"VK_DRIVER_FILES", "VK_ICD_FILENAMES"}) // the latter is the older name
        if (named_by.empty() && !variable(name).empty())
            named_by = name;
    if (!named_by.empty()) {
        const std::vector<fs::path> files = manifests(split(variable(named_by.c_str())));
        return named_by + " names " +
               (files.empty() ? "no manifest: " + in_quotes(variable(named_by.c_str()))
                              : list_of(files)) +
               "; correct it, or unset it so that the system's drivers are found";
    }
    std::vector<fs::path> folders = usual_folders();
    std::vector<fs::path> places = split(variable("VK_ADD_DRIVER_FILES"));
    places.insert(places.end(), folders.begin(), folders.end());
    std::erase_if(places, [](const fs::path& place) {
        std::error_code error;
        return !fs::exists(place, error);
    });
    const std::vector<fs::path> files = manifests(places);
    if (!files.empty())
        return "the drivers here are " + list_of(files) + "; " + kInstall;
    std::string text;
    for (const fs::path& folder : folders)
        text += (text.empty() ? "" : ", ") + in_quotes(folder.string());
    return "none is installed in " + text + "; " + kInstall;
}

} // namespace bellows::detail
