// SPDX-License-Identifier: MIT
// Loads any bytes as a tiktoken.model and, behind the first zero byte, its tokenizer_config.json;
// what loads must encode and decode without harm.
#include "fuzz/tokenizer_input.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string all(reinterpret_cast<const char*>(data), size);
    const std::size_t cut = std::min(all.find('\0'), all.size());
    std::string config = all.substr(std::min(cut + 1, all.size()));
    if (config.empty()) {
        config = R"({"added_tokens_decoder": {"999999": {"content": "[EOS]"}}})";
    }
    bellows::fuzz::use_tokenizer(
        {{"tiktoken.model", all.substr(0, cut)}, {"tokenizer_config.json", config}}, config);
    return 0;
}
