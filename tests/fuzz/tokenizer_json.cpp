// SPDX-License-Identifier: MIT
// Loads any bytes as a tokenizer.json; what loads must encode and decode without harm.
#include "fuzz/tokenizer_input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string json(reinterpret_cast<const char*>(data), size);
    bellows::fuzz::use_tokenizer({{"tokenizer.json", json}}, json);
    return 0;
}
