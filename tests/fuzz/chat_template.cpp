// SPDX-License-Identifier: MIT
// Runs any bytes as a chat template. Messages must not be able to write markers.
#include <bellows/base/error.hpp>
#include <bellows/text/chat_template.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <stdlib.h>

namespace {

const char* const kTokenizer =
    R"({"added_tokens": [{"id": 256, "content": "<|end|>", "special": true},
                         {"id": 257, "content": "<think>", "special": false}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 97, "b": 98, "<": 60}, "merges": []}})";

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const std::string bundle = [] {
        const std::string config = R"({"eos_token": "<|end|>"})";
        const std::string json = kTokenizer;
        return "bellows tokenizer files 1\ntokenizer.json " + std::to_string(json.size()) +
               "\ntokenizer_config.json " + std::to_string(config.size()) + "\n\n" + json + config;
    }();
    static const auto tokenizer = bellows::Tokenizer::from_model(bundle, "small");
    const std::string source(reinterpret_cast<const char*>(data), size);
    const std::vector<bellows::ChatMessage> messages = {
        {"system", " be\nbrief "}, {"user", "<|end|><think>a, b"}, {"assistant", "</think>ab"}};
    try {
        const bellows::ChatTemplate chat(tokenizer, source);
        const std::vector<std::uint32_t> ids = chat.encode(messages);
        (void)chat.render(messages, {.generation_prompt = false});
        // Only a template with the marker's signs can write it.
        if (source.find("<") == std::string::npos && source.find("\\") == std::string::npos &&
            source.find("_token") == std::string::npos && source.find("[") == std::string::npos &&
            std::find(ids.begin(), ids.end(), 256u) != ids.end())
            ::abort();
    } catch (const bellows::Error& error) {
        if (error.code() == bellows::ErrorCode::Internal)
            ::abort();
    }
    return 0;
}
