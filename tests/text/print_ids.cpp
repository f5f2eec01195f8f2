// SPDX-License-Identifier: MIT
// print_ids TOKENIZER [--special]: reads lines, each with "\n", "\r" and "\\" for newline,
// carriage return and backslash, and prints the ids of each on a line. For compare_tokenizers.py.
//   print_ids TOKENIZER --chat: reads conversations, a line "role<TAB>content" for each
// message and an empty line behind each conversation, and prints ids, and the text on a line.
//   print_ids TOKENIZER --decode: reads lines of ids and prints their text, as lines like those.
#include "text/line_escapes.hpp"

#include <bellows/base/error.hpp>
#include <bellows/text/chat_template.hpp>
#include <bellows/text/stream_decoder.hpp>
#include <bellows/text/tokenizer.hpp>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

void print_line(std::string line) {
    line += '\n';
    std::fwrite(line.data(), 1, line.size(), stdout);
}

void print(const std::vector<std::uint32_t>& ids) {
    std::string line;
    for (const std::uint32_t id : ids) {
        line += (line.empty() ? "" : " ") + std::to_string(id);
    }
    print_line(std::move(line));
}

void print_texts(const bellows::Tokenizer& tokenizer) {
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::vector<std::uint32_t> ids;
        bellows::StreamDecoder stream(tokenizer);
        std::string streamed;
        for (std::uint32_t id = 0; words >> id;) {
            ids.push_back(id);
            streamed += stream.add(id);
        }
        streamed += stream.finish();
        const std::string text = tokenizer.decode(ids);
        if (streamed != text) {
            throw bellows::Error(bellows::ErrorCode::Internal,
                                 "streaming gives another text for " + line);
        }
        print_line(bellows::escaped(text));
    }
}

void print_chats(const bellows::Tokenizer& tokenizer) {
    const bellows::ChatTemplate chat(tokenizer);
    std::vector<bellows::ChatMessage> messages;
    for (std::string line; std::getline(std::cin, line);) {
        if (line.empty()) {
            print(chat.encode(messages));
            print_line(bellows::escaped(chat.render(messages)));
            messages.clear();
            continue;
        }
        const std::size_t tab = line.find('\t');
        messages.push_back(
            {line.substr(0, tab), bellows::unescaped(std::string_view(line).substr(tab + 1))});
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc < 2 || argc > 3) {
        std::fprintf(stderr, "print_ids TOKENIZER [--special | --chat | --decode]\n");
        return 2;
    }
    try {
        const auto tokenizer = bellows::Tokenizer::from_name(argv[1]);
        const std::string_view what = argc > 2 ? argv[2] : "";
        if (what == "--chat") {
            print_chats(tokenizer);
        } else if (what == "--decode") {
            print_texts(tokenizer);
        } else {
            const bellows::EncodeOptions options{.special_tokens = what == "--special"};
            for (std::string line; std::getline(std::cin, line);) {
                print(tokenizer.encode(bellows::unescaped(line), options));
            }
        }
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "print_ids: %s\n", error.what());
        return 2;
    }
    return 0;
}
