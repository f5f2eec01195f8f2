// SPDX-License-Identifier: MIT
#pragma once

// Loads a tokenizer of made-up files and uses it.

#include <bellows/base/error.hpp>
#include <bellows/text/stream_decoder.hpp>
#include <bellows/text/tokenizer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <stdlib.h>

namespace bellows::fuzz {

/// text: encoded, beside a text of all sorts. Aborts where streaming gives another text.
inline void use_tokenizer(const std::map<std::string, std::string>& files,
                          const std::string& text) {
    constexpr std::size_t kLongestText = 300;
    std::string packed = "bellows tokenizer files 1\n";
    std::string contents;
    for (const auto& [name, content] : files) {
        packed += name + " " + std::to_string(content.size()) + "\n";
        contents += content;
    }
    try {
        const auto tokenizer = Tokenizer::from_model(packed + "\n" + contents, "fuzzed");
        for (const std::string& sample :
             {std::string("the \xef\xbd\xb6\xef\xbe\x9e forge's\n\n  breathes \xff 7\t1/2 "
                          "\xe4\xbd\xa0\xe5\xa5\xbd e\xcc\x81 <|im_end|>"),
              text.substr(0, kLongestText),
              text.substr(text.size() - std::min(text.size(), kLongestText))}) {
            for (const bool special : {false, true}) {
                const std::vector<std::uint32_t> ids =
                    tokenizer.encode(sample, {.special_tokens = special, .text_frame = special});
                StreamDecoder stream(tokenizer);
                std::string streamed;
                for (const std::uint32_t id : ids)
                    streamed += stream.add(id);
                if (streamed + stream.finish() != tokenizer.decode(ids))
                    ::abort();
            }
        }
    } catch (const Error& error) {
        if (error.code() == ErrorCode::Internal)
            ::abort();
    }
}

} // namespace bellows::fuzz
