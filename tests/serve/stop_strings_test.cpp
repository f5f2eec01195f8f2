// SPDX-License-Identifier: MIT
#include "support/temporary_folder.hpp"
#include "text/bpe/byte_alphabet.hpp"
#include "text/bpe/utf8.hpp"

#include <bellows/serve/stop_strings.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

using namespace bellows;

namespace {

using Strings = std::vector<std::string>;

/// Byte-level BPE that has every part of some bytes as a token.
class AllParts {
public:
    explicit AllParts(std::string_view bytes) {
        std::map<std::string, std::string> spelling; // of a byte, as tokenizer.json writes it
        for (char32_t character = 1; character < 0x180; ++character) {
            std::string utf8;
            text::append_utf8(utf8, character);
            if (const auto byte = text::bytes_of_token(utf8)) {
                spelling[*byte] = utf8;
            }
        }
        std::string vocabulary;
        for (std::size_t first = 0; first < bytes.size(); ++first) {
            for (std::size_t count = 1; first + count <= bytes.size(); ++count) {
                const std::string part(bytes.substr(first, count));
                if (!ids_.try_emplace(part, static_cast<std::uint32_t>(ids_.size())).second) {
                    continue;
                }
                std::string spelled;
                for (const char byte : part) {
                    spelled += spelling.at(std::string(1, byte));
                }
                vocabulary += "\"" + spelled + "\": " + std::to_string(ids_.at(part)) + ", ";
            }
        }
        tokenizer_ = std::make_unique<Tokenizer>(Tokenizer::from_model(
            R"({"added_tokens": [{"id": )" + std::to_string(ids_.size()) +
                R"(, "content": "<|endoftext|>", "special": true}],
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
                "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": {)" +
                vocabulary.substr(0, vocabulary.size() - 2) + R"(}, "merges": []}})",
            "all parts"));
    }

    const Tokenizer& tokenizer() const { return *tokenizer_; }
    std::uint32_t id(const std::string& part) const { return ids_.at(part); }
    std::uint32_t end() const { return static_cast<std::uint32_t>(ids_.size()); }

private:
    std::map<std::string, std::uint32_t> ids_;
    std::unique_ptr<Tokenizer> tokenizer_;
};

struct Shown {
    std::string text;
    std::string stop; ///< "": none
};

/// What is shown of a whole text: up to the stop string that is complete first, the longest of
/// those that are complete at the same byte.
Shown shown_at_once(const std::string& whole, const Strings& stops) {
    for (std::size_t end = 1; end <= whole.size(); ++end) {
        std::string found;
        for (const std::string& stop : stops) {
            const bool here = std::string_view(whole).substr(0, end).ends_with(stop);
            found = here && stop.size() > found.size() ? stop : found;
        }
        if (!found.empty()) {
            return {whole.substr(0, end - found.size()), found};
        }
    }
    return {whole, ""};
}

/// Bytes at the end of a text that begin a stop string.
std::size_t held_back(const std::string& text, const Strings& stops) {
    std::size_t most = 0;
    for (const std::string& stop : stops) {
        for (std::size_t bytes = 1; bytes <= std::min(stop.size(), text.size()); ++bytes) {
            if (text.ends_with(stop.substr(0, bytes))) {
                most = std::max(most, bytes);
            }
        }
    }
    return most;
}

struct Case {
    std::string bytes;
    Strings stops;
    std::string text; ///< that is shown
    std::string stop;
};

const std::vector<Case> kCases = {
    {"Hello world", {}, "Hello world", ""},
    {"Hello world", {"wor"}, "Hello ", "wor"},
    {"Hello world", {"xyz", "dx"}, "Hello world", ""},
    {"abcabd", {"abd"}, "abc", "abd"},
    {"aaab", {"aab"}, "a", "aab"},
    {"xabcy", {"abcd", "bc"}, "xa", "bc"},  // the longer one is held and then breaks
    {"xabcdy", {"abcd", "bc"}, "xa", "bc"}, // the first that is complete
    {"xabcdy", {"abcd", "abce"}, "x", "abcd"},
    {"xabcey", {"abcd", "abce"}, "x", "abce"},
    {"xabcfy", {"abcd", "abce"}, "xabcfy", ""},
    {"xaby", {"b", "ab"}, "x", "ab"}, // both at the same byte
    {"xaby", {"ab", "abc"}, "x", "ab"},
    {"stop", {"stop"}, "", "stop"},
    {"a\n\nb", {"\n\n"}, "a", "\n\n"},
    {"né d'été", {"été"}, "né d'", "été"},
    {"né d'été", {"éta"}, "né d'été", ""},
    {"né", {"\xc3\xa8"}, "né", ""},                          // é and è begin with the same byte
    {"a\xf0\x9f\x98\x80z", {"z"}, "a\xf0\x9f\x98\x80", "z"}, // a character of four bytes
    {"a\xf0\x9f\x98\x80z", {"\xf0\x9f\x98\x80"}, "a", "\xf0\x9f\x98\x80"},
    {"a\xf0\x9f\x98", {"b"}, "a\xef\xbf\xbd", ""}, // not complete at the end
    {"\xff b", {" b"}, "\xef\xbf\xbd", " b"},
    {"ab\xc3", {"bc"}, "ab\xef\xbf\xbd", ""},
};

} // namespace

// Every text in every split into tokens: what is shown is never taken back, nothing is held without
// need, and the whole is that of the table, which a plain search gives, too.
TEST(AnswerText, IsTheSameInEverySplitIntoTokens) {
    for (const Case& it : kCases) {
        SCOPED_TRACE(it.bytes + " until " + it.stop);
        const AllParts parts(it.bytes);
        const Shown expected = shown_at_once(text::repaired(it.bytes), it.stops);
        ASSERT_EQ(expected.text, it.text);
        ASSERT_EQ(expected.stop, it.stop);
        for (std::uint64_t cuts = 0; cuts < std::uint64_t{1} << (it.bytes.size() - 1); ++cuts) {
            AnswerText answer(parts.tokenizer(), it.stops);
            std::string shown, part, given;
            for (std::size_t i = 0; i < it.bytes.size(); ++i) {
                part += it.bytes[i];
                if (i + 1 < it.bytes.size() && (cuts >> i & 1) == 0) {
                    continue;
                }
                given += part;
                shown += answer.add(std::vector<std::uint32_t>{parts.id(part)});
                part.clear();
                ASSERT_TRUE(text::is_utf8(shown));
                ASSERT_TRUE(expected.text.starts_with(shown)) << shown;
                std::string unfinished = given;
                const std::string complete = text::take_complete(unfinished);
                const bool stopped = !shown_at_once(complete, it.stops).stop.empty();
                ASSERT_EQ(answer.stopped(), stopped);
                ASSERT_EQ(shown.size(), stopped ? expected.text.size()
                                                : complete.size() - held_back(complete, it.stops));
            }
            shown += answer.finish();
            ASSERT_EQ(shown, expected.text);
            ASSERT_EQ(answer.stop(), expected.stop);
            ASSERT_EQ(answer.stopped(), !expected.stop.empty());
            ASSERT_EQ(answer.finish(), "") << "nothing is left";
        }
    }
}

TEST(AnswerText, TakesManyTokensAtOnceAndNothingAfterTheStop) {
    const Tokenizer bytes = Tokenizer::bytes();
    AnswerText answer(bytes, {"END"});
    EXPECT_EQ(answer.add(bytes.encode("one ENtwo EN")), "one ENtwo ");
    EXPECT_FALSE(answer.stopped());
    EXPECT_EQ(answer.add(bytes.encode("D three")), "");
    EXPECT_TRUE(answer.stopped());
    EXPECT_EQ(answer.stop(), "END");
    EXPECT_EQ(answer.add(bytes.encode("four")), "");
    EXPECT_EQ(answer.finish(), "");
    EXPECT_BELLOWS_ERROR(AnswerText(bytes, {}).add(std::vector<std::uint32_t>{256}),
                         InvalidArgument, "256");
}

TEST(AnswerText, ShowsSpecialTokensOnRequestAlone) {
    const AllParts parts("ab");
    const std::vector<std::uint32_t> ids = {parts.id("ab"), parts.end(), parts.id("b")};
    EXPECT_EQ(AnswerText(parts.tokenizer(), {}).add(ids), "abb");
    EXPECT_EQ(AnswerText(parts.tokenizer(), {}, true).add(ids), "ab<|endoftext|>b");
    AnswerText stopped(parts.tokenizer(), {"<|endoftext|>"}, true);
    EXPECT_EQ(stopped.add(ids), "ab");
    EXPECT_TRUE(stopped.stopped());
}
