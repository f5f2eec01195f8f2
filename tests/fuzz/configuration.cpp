// SPDX-License-Identifier: MIT
// Reads any bytes as a configuration file. What can be read is written and read back equal.
#include <bellows/base/error.hpp>
#include <bellows/train/train_config.hpp>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <stdlib.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    try {
        const bellows::RunConfig config = bellows::parse_run_config(text, "fuzzed", "/folder");
        const std::string written = bellows::to_toml(config);
        const bellows::RunConfig again = bellows::parse_run_config(written, "written", "/folder");
        if (!(again.model == config.model) || bellows::to_toml(again) != written)
            ::abort();
        bellows::validate(config.train);
    } catch (const bellows::Error& error) {
        if (error.code() == bellows::ErrorCode::Internal)
            ::abort();
    }
    return 0;
}
