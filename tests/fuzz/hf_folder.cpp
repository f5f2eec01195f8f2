// SPDX-License-Identifier: MIT
// Reads any bytes as a Hugging Face folder: two lengths of 16 bits, a config.json, an index (none:
// the tensors are one file), and a file of tensors. Every parameter of what is taken is read.
#include <bellows/base/error.hpp>
#include <bellows/checkpoint/hf_folder.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include <stdlib.h>
#include <unistd.h>

namespace {

namespace fs = std::filesystem;

/// One for all inputs of this process.
const fs::path& folder() {
    static const fs::path path = [] {
        const fs::path made = fs::temp_directory_path() / ("fuzz-hf-" + std::to_string(::getpid()));
        fs::create_directories(made);
        return made;
    }();
    return path;
}

void write(const char* name, std::string_view content) {
    std::ofstream(folder() / name, std::ios::binary) << content;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    constexpr std::size_t kLengths = 4;
    constexpr std::uint64_t kMostRead = 1 << 20; // elements: a list of parameters is no file
    if (size < kLengths)
        return 0;
    const std::string_view all(reinterpret_cast<const char*>(data), size);
    const auto length = [&](std::size_t at) {
        return static_cast<std::size_t>(data[at] | data[at + 1] << 8);
    };
    const std::string_view config = all.substr(kLengths, length(0));
    const std::string_view index = all.substr(std::min(kLengths + length(0), size), length(2));
    const std::string_view tensors = all.substr(std::min(kLengths + length(0) + length(2), size));
    std::error_code none;
    fs::remove(folder() / "model.safetensors.index.json", none);
    fs::remove(folder() / "model.safetensors", none);
    write("config.json", config);
    if (!index.empty())
        write("model.safetensors.index.json", index);
    write(index.empty() ? "model.safetensors" : "a.safetensors", tensors);
    try {
        const bellows::HfFolder model(folder());
        for (const bellows::ParameterInfo& info : bellows::parameters(model.config().model)) {
            if (info.size() > kMostRead)
                ::abort(); // more than the file can hold
            std::vector<float> values(info.size());
            model.read(info, 0, values);
            if (!model.has_codes(info))
                continue;
            std::vector<std::uint8_t> codes(info.size());
            model.read_codes(info, 0, codes);
            const auto blocks = [](std::uint64_t extent) { return (extent + 127) / 128; };
            std::vector<float> scales(blocks(info.shape[0]) * blocks(info.shape[1]));
            model.read_scales(info, scales);
        }
        (void)bellows::format_hf_config(model.config().model, {});
    } catch (const bellows::Error& error) {
        if (error.code() == bellows::ErrorCode::Internal)
            ::abort();
    }
    return 0;
}
