// SPDX-License-Identifier: MIT
// Folders of Hugging Face models whose tokenizer is a sentencepiece model.
#include "support/temporary_folder.hpp"
#include "text/small_model.hpp"

#include <bellows/base/files.hpp>
#include <bellows/text/chat_template.hpp>
#include <bellows/text/stream_decoder.hpp>

#include <algorithm>
#include <string>
#include <vector>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

/// A folder with a small model that falls back to bytes.
void make_folder(const TemporaryFolder& folder) {
    fs::copy(small_model(folder, "--byte_fallback"), folder.path() / "tokenizer.model");
    folder.write("tokenizer_config.json",
                 R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": true,
                     "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{{ eos_token }}{% endfor %}"})");
}

} // namespace

TEST(SentencepieceFolder, OpensAndGoesThroughACheckpoint) {
    TemporaryFolder folder;
    make_folder(folder);
    const Tokenizer tokenizer = Tokenizer::from_name(folder.path().string());
    const Tokenizer alone = Tokenizer::from_name((folder.path() / "tokenizer.model").string());
    EXPECT_EQ(tokenizer.encode("the forge breathes"), alone.encode("the forge breathes"));
    EXPECT_EQ(tokenizer.end_of_document(), tokenizer.id_of("</s>"));
    EXPECT_EQ(tokenizer.bos(), tokenizer.id_of("<s>"));
    const std::vector<std::uint32_t> framed = tokenizer.encode("the", {.text_frame = true});
    EXPECT_EQ(framed.front(), tokenizer.bos());
    const Tokenizer again = Tokenizer::from_model(tokenizer.model(), "again");
    EXPECT_EQ(again.fingerprint(), tokenizer.fingerprint());
    EXPECT_EQ(again.chat_template(), tokenizer.chat_template());
    EXPECT_EQ(again.files().at("tokenizer.model"),
              read_file(folder.path() / "tokenizer.model", 1 << 20));
}

TEST(SentencepieceFolder, DecodesTokenByToken) {
    TemporaryFolder folder;
    make_folder(folder);
    const Tokenizer tokenizer = Tokenizer::from_folder(folder.path());
    std::string text;
    for (int i = 0; i < 40; ++i) { // longer than what the decoder keeps
        text += "the forge of 你好 😀 number " + std::to_string(i) + " breathes, ";
    }
    text += "slowly";
    const std::vector<std::uint32_t> ids = tokenizer.encode(text);
    StreamDecoder stream(tokenizer);
    std::string streamed;
    std::size_t growing = 0;
    for (const std::uint32_t id : ids) {
        const std::string part = stream.add(id);
        growing += !part.empty();
        streamed += part;
        ASSERT_EQ(text.substr(0, streamed.size()), streamed);
    }
    EXPECT_EQ(streamed + stream.finish(), text);
    EXPECT_EQ(tokenizer.decode(ids), text);
    EXPECT_GT(growing, ids.size() / 3) << "it comes as it grows";
}

TEST(SentencepieceFolder, KeepsControlPiecesOutOfText) {
    TemporaryFolder folder;
    make_folder(folder);
    const Tokenizer tokenizer = Tokenizer::from_folder(folder.path());
    const std::uint32_t end = tokenizer.end_of_document();
    const ChatTemplate chat(tokenizer);
    const std::vector<std::uint32_t> ids =
        chat.encode(std::vector<ChatMessage>{{"user", "the </s> forge"}, {"user", "x"}});
    EXPECT_EQ(ids.front(), tokenizer.bos());
    EXPECT_EQ(std::count(ids.begin(), ids.end(), end), 2);
    EXPECT_EQ(tokenizer.encode("</s>", {.special_tokens = true}), std::vector{end});
    const std::vector<std::uint32_t> plain = tokenizer.encode("</s>");
    EXPECT_EQ(std::count(plain.begin(), plain.end(), end), 0);
}
