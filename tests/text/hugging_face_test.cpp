// SPDX-License-Identifier: MIT
// Tokenizers of Hugging Face folders against what PyPI's packages gave the same lines (see
// make_tokenizer_fixtures.py).
#include "support/temporary_folder.hpp"
#include "text/line_escapes.hpp"

#include <bellows/text/corpus.hpp>
#include <bellows/text/stream_decoder.hpp>
#include <bellows/text/tokenizer.hpp>

#include <array>
#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

const fs::path kFolder = BELLOWS_TOKENIZERS;
constexpr std::array kKinds = {"v3", "v2", "llama3", "qwen", "gpt2", "kimi"};

std::vector<std::string> lines_of(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
        lines.push_back(line);
    }
    EXPECT_GE(lines.size(), 200u) << path;
    return lines;
}

std::vector<std::uint32_t> ids_of(const std::string& text) {
    std::istringstream words(text);
    std::vector<std::uint32_t> ids;
    for (std::uint32_t id = 0; words >> id;) {
        ids.push_back(id);
    }
    return ids;
}

/// All lines as one text, some hundred kilobytes, with lines of all lengths.
std::string long_text() {
    std::string text;
    const std::vector<std::string> lines = lines_of(kFolder / "lines.txt");
    for (std::size_t i = 0; text.size() < 1500000; i = i * 7 + 5) {
        text += unescaped(lines[i % lines.size()]);
        text += i % 3 == 0 ? "\n" : " word\n";
    }
    std::erase(text, '\0');
    return text;
}

} // namespace

TEST(HuggingFace, GivesTheIdsOfThePackages) {
    const std::vector<std::string> lines = lines_of(kFolder / "lines.txt");
    for (const char* kind : kKinds) {
        const Tokenizer tokenizer = Tokenizer::from_folder(kFolder / kind);
        const std::vector<std::string> expected = lines_of(kFolder / kind / "ids.txt");
        ASSERT_EQ(expected.size(), lines.size());
        int with_special = 0;
        for (std::size_t i = 0; i < lines.size(); ++i) {
            const std::string text = unescaped(lines[i]);
            const std::size_t bar = expected[i].find('|');
            EXPECT_EQ(tokenizer.encode(text), ids_of(expected[i].substr(0, bar)))
                << kind << ": " << lines[i];
            EXPECT_EQ(tokenizer.encode(text, {.special_tokens = true}),
                      ids_of(expected[i].substr(bar == std::string::npos ? 0 : bar + 1)))
                << kind << ": " << lines[i];
            with_special += bar != std::string::npos;
        }
        EXPECT_GT(with_special, 3) << kind;
    }
}

TEST(HuggingFace, DecodesWholeAndTokenByToken) {
    for (const char* kind : kKinds) {
        const Tokenizer tokenizer = Tokenizer::from_folder(kFolder / kind);
        for (const std::string& text :
             {std::string("plain"), std::string("你好 😀 e\u0301 \n\n x"),
              std::string("👨‍👩‍👧‍👦"), std::string("<think> & </s>")}) {
            const std::vector<std::uint32_t> ids = tokenizer.encode(text);
            StreamDecoder stream(tokenizer);
            std::string streamed;
            for (const std::uint32_t id : ids) {
                streamed += stream.add(id);
                ASSERT_EQ(streamed.find("\ufffd"), std::string::npos) << "half a character";
            }
            EXPECT_EQ(streamed + stream.finish(), tokenizer.decode(ids));
            EXPECT_EQ(tokenizer.decode(ids), std::string(kind) == "qwen" && text[0] == '\xe4'
                                                 ? "你好 😀 \u00e9 \n\n x" // NFC
                                                 : text);
        }
        // An unfinished character becomes U+FFFD at the end, or when something else follows.
        const std::vector<std::uint32_t> two = tokenizer.encode("\u0bf5a"); // tokens of a byte each
        ASSERT_EQ(two.size(), 4u) << kind;
        StreamDecoder stream(tokenizer);
        EXPECT_EQ(stream.add(two[0]), "");
        EXPECT_EQ(stream.add(two[1]), "");
        EXPECT_EQ(stream.finish(), "\ufffd");
        EXPECT_EQ(stream.add(two[0]), "");
        EXPECT_EQ(stream.add(two[3]), "\ufffda");
        EXPECT_BELLOWS_ERROR(stream.add(tokenizer.vocabulary()), InvalidArgument, "vocabulary");
    }
}

TEST(HuggingFace, KeepsSpecialTokensApartFromText) {
    const Tokenizer llama = Tokenizer::from_folder(kFolder / "llama3");
    const std::uint32_t bos = llama.id_of("<|begin_of_text|>").value();
    const std::uint32_t end = llama.id_of("<|eot_id|>").value();
    EXPECT_EQ(llama.bos(), bos);
    const std::string text = "<|eot_id|>";
    for (const std::uint32_t id : llama.encode(text)) {
        EXPECT_NE(id, end);
    }
    EXPECT_EQ(llama.decode(llama.encode(text)), text);
    EXPECT_EQ(llama.encode(text, {.special_tokens = true}), std::vector{end});
    EXPECT_EQ(llama.encode("", {.text_frame = true}), std::vector{bos});
    EXPECT_EQ(llama.decode(std::vector{bos, end}), "");
    StreamDecoder shown(llama, true);
    EXPECT_EQ(shown.add(end), text);

    const Tokenizer v3 = Tokenizer::from_folder(kFolder / "v3");
    EXPECT_EQ(v3.encode("", {.text_frame = true}), std::vector{v3.bos().value()})
        << "add_bos_token";
    EXPECT_EQ(v3.end_of_document(), v3.id_of("<｜end▁of▁sentence｜>"));
}

TEST(HuggingFace, TakesEndTokensFromAllFiles) {
    TemporaryFolder folder;
    fs::copy(kFolder / "llama3" / "tokenizer.json", folder.path() / "tokenizer.json");
    const auto open = [&] { return Tokenizer::from_folder(folder.path()); };
    const std::uint32_t first = open().id_of("<|end_of_text|>").value();
    const std::uint32_t second = open().id_of("<|eot_id|>").value();
    EXPECT_EQ(open().end_tokens(), std::vector{first}) << "its usual name";
    folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<|eot_id|>"}})");
    EXPECT_EQ(open().end_tokens(), std::vector{second});
    folder.write("generation_config.json", "{\"eos_token_id\": [" + std::to_string(second) + ", " +
                                               std::to_string(first) + "]}");
    EXPECT_EQ(open().end_tokens(), (std::vector{first, second}));
    EXPECT_EQ(open().end_of_document(), second);
    folder.write("generation_config.json", "{\"eos_token_id\": 99999}");
    EXPECT_BELLOWS_ERROR(open(), Corrupt, "99999");
    folder.write("generation_config.json", "{\"eos_token_id\": 1, \"eos_token_id\": 1}");
    EXPECT_BELLOWS_ERROR(open(), Corrupt, "twice");
    folder.write("generation_config.json", "{}");
    folder.write("tokenizer_config.json", R"({"eos_token": "<|nothing|>"})");
    EXPECT_BELLOWS_ERROR(open(), Corrupt, "<|nothing|>");
    EXPECT_BELLOWS_ERROR(Tokenizer::from_folder(folder.path() / "none"), Io, "no tokenizer in");
}

TEST(HuggingFace, GoesThroughACheckpointsText) {
    for (const char* kind : kKinds) {
        const Tokenizer first = Tokenizer::from_name((kFolder / kind).string());
        const Tokenizer again = Tokenizer::from_model(first.model(), "again");
        EXPECT_EQ(first.fingerprint(), again.fingerprint());
        EXPECT_EQ(first.vocabulary(), again.vocabulary());
        EXPECT_EQ(first.end_tokens(), again.end_tokens());
        EXPECT_EQ(first.encode("the <think> 你好"), again.encode("the <think> 你好"));
        TemporaryFolder folder;
        for (const auto& [name, content] : again.files()) {
            folder.write(name, content);
        }
        EXPECT_EQ(Tokenizer::from_folder(folder.path()).fingerprint(), first.fingerprint());
        EXPECT_BELLOWS_ERROR(
            Tokenizer::from_model(first.model().substr(0, first.model().size() - 1), "cut"),
            Corrupt, "whole");
    }
    EXPECT_EQ(Tokenizer::from_name((kFolder / "v3" / "tokenizer.json").string()).fingerprint(),
              Tokenizer::from_folder(kFolder / "v3").fingerprint());
}

TEST(HuggingFace, TokenisesACorpusAsAWhole) {
    const std::string text = long_text();
    TemporaryFolder folder;
    const std::vector<fs::path> paths = {folder.write("long.txt", text)};
    for (const char* kind : kKinds) {
        const Tokenizer tokenizer = Tokenizer::from_folder(kFolder / kind);
        const Corpus corpus = Corpus::read(paths, tokenizer);
        std::vector<std::uint32_t> ids(corpus.num_tokens());
        corpus.copy(0, ids);
        std::vector<std::uint32_t> expected = tokenizer.encode(text);
        expected.push_back(tokenizer.end_of_document());
        EXPECT_TRUE(ids == expected) << kind << ": the cuts between blocks show";
    }
}

// Quadratic work would take minutes for each of these.
TEST(HuggingFace, TakesLongRunsQuickly) {
    const std::size_t count = 300000;
    std::string mixed;
    while (mixed.size() < count) {
        mixed += " \n \t";
    }
    for (const char* kind : kKinds) {
        const Tokenizer tokenizer = Tokenizer::from_folder(kFolder / kind);
        for (const std::string& text :
             {std::string(count, 'a'), std::string(count, ' '), std::string(count, ' ') + "x",
              std::string(count, '\n'), std::string(count, '!'), std::string(count, '1'), mixed,
              mixed + "x", std::string(count, '\xff')}) {
            const auto start = std::chrono::steady_clock::now();
            EXPECT_FALSE(tokenizer.encode(text).empty());
            EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10))
                << kind << " with " << static_cast<int>(text[0]);
        }
    }
}
