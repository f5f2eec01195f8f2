// SPDX-License-Identifier: MIT
// Loads any bytes as a sentencepiece model; what loads must encode and decode without harm.
#include <bellows/base/error.hpp>
#include <bellows/text/tokenizer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    constexpr std::size_t kLongestText = 200;
    const std::string model(reinterpret_cast<const char*>(data), size);
    try {
        const auto tokenizer = bellows::Tokenizer::from_model(model, "fuzzed");
        // Texts that the model has pieces for, and others.
        const std::string_view end =
            std::string_view(model).substr(size - std::min(size, kLongestText));
        for (const std::string_view text :
             {std::string_view("the \xef\xbd\xb6\xef\xbe\x9e forge\n\n breathes \xff 7\t1/2"), end,
              std::string_view(model).substr(0, kLongestText)}) {
            const std::vector<std::uint32_t> ids = tokenizer.encode(text);
            (void)tokenizer.decode(ids);
        }
        std::vector<std::uint32_t> all(std::min(tokenizer.vocabulary(), 300u));
        for (std::uint32_t id = 0; id < all.size(); ++id) {
            all[id] = id;
        }
        (void)tokenizer.decode(all);
    } catch (const bellows::Error&) {
        return 0;
    }
    return 0;
}
