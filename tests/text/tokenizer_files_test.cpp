// SPDX-License-Identifier: MIT
// Files of tokenizers that are not as they should be: each gives one line that names the fault.
#include "support/temporary_folder.hpp"

#include <bellows/text/tokenizer.hpp>

#include <string>
#include <vector>

using namespace bellows;

namespace {

const std::string kJson = R"({
"added_tokens": [{"id": 5, "content": "<|endoftext|>", "special": true}],
"normalizer": {"type": "Sequence", "normalizers": []},
"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated", "invert": false},
    {"type": "Digits", "individual_digits": true},
    {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]},
"post_processor": {"type": "ByteLevel"},
"decoder": {"type": "ByteLevel"},
"model": {"type": "BPE", "dropout": null, "unk_token": null,
    "vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3, "1": 4}, "merges": ["a b", ["ab", "a"]]}})";

std::string changed(const std::string& what, const std::string& by) {
    std::string json = kJson;
    const std::size_t at = json.find(what);
    EXPECT_NE(at, std::string::npos) << what;
    return json.replace(at, what.size(), by);
}

struct Fault {
    std::string what, by;
    ErrorCode code;
    std::string says;
};

} // namespace

TEST(TokenizerJson, ReadsBothSpellingsOfMerges) {
    const Tokenizer tokenizer = Tokenizer::from_model(kJson, "small");
    EXPECT_EQ(tokenizer.encode("ababab11"), (std::vector<std::uint32_t>{2, 2, 2, 4, 4}))
        << "\"a b\" has the lower rank";
    EXPECT_EQ(tokenizer.encode("abaxa"), (std::vector<std::uint32_t>{3, 0})) << "no token for x";
    EXPECT_EQ(tokenizer.vocabulary(), 6u);
    EXPECT_EQ(tokenizer.end_of_document(), 5u);
}

TEST(TokenizerJson, RefusesByName) {
    const auto kCorrupt = ErrorCode::Corrupt;
    const auto kUnsupported = ErrorCode::Unsupported;
    const std::vector<Fault> faults = {
        {"\"BPE\"", "\"Unigram\"", kUnsupported, "\"Unigram\""},
        {"\"dropout\": null", "\"dropout\": 0.1", kUnsupported, "dropout"},
        {"\"unk_token\": null", "\"unk_token\": \"a\"", kUnsupported, "253 have none"},
        {"\"unk_token\": null", "\"byte_fallback\": true", kUnsupported, "byte_fallback"},
        {"\"unk_token\": null", "\"end_of_word_suffix\": \"</w>\"", kUnsupported, "end_of_word"},
        {"\"unk_token\": null", "\"new_thing\": 1", kUnsupported, "\"new_thing\""},
        {"\"aba\": 3", "\"aba\": -3", kCorrupt, "\"aba\""},
        {"\"aba\": 3", "\"aba\": 16777216", kCorrupt, "below 16777216"},
        {"\"aba\": 3", "\"aba\": 99999999999", kCorrupt, "\"aba\""},
        {"\"aba\": 3", "\"aba\": 2", kCorrupt, "the same id 2"},
        {"\"aba\": 3", "\"ab\": 3", kCorrupt, "\"ab\" twice"},
        {"\"a b\"", "\"a x\"", kCorrupt, "\"ax\""},
        {"\"a b\"", "\"ab\"", kCorrupt, "no pair"},
        {"[\"ab\", \"a\"]", "[\"ab\"]", kCorrupt, "no pair"},
        {"[\"ab\", \"a\"]", "7", kCorrupt, "no pair"},
        {"\"id\": 5", "\"id\": 4", kCorrupt, "the same id 4"},
        {"\"<|endoftext|>\"", "\"\"", kCorrupt, "0 bytes"},
        {"\"<|endoftext|>\"", "\"ab\"", kCorrupt, "\"ab\" has the id 5"},
        {"\"special\": true", "\"special\": 1", kCorrupt, "true or false"},
        {"\"special\": true", "\"odd\": true", kUnsupported, "\"odd\""},
        {"\"normalizers\": []", "\"normalizers\": [{\"type\": \"NFKC\"}]", kUnsupported, "NFKC"},
        {"\"Digits\", \"individual_digits\": true", "\"Whitespace\"", kUnsupported, "Whitespace"},
        {"\"Isolated\"", "\"Removed\"", kUnsupported, "\"Removed\""},
        {"\"invert\": false", "\"invert\": true", kUnsupported, "invert"},
        {"\"add_prefix_space\": false", "\"add_prefix_space\": true", kUnsupported,
         "add_prefix_space"},
        {"\\\\p{N}{1,3}", "(a)\\\\1", kUnsupported, "the escape"},
        {"\\\\p{N}{1,3}", "(?R)", kUnsupported, "(?R"},
        {"\\\\p{N}{1,3}", "(*UTF)", kUnsupported, "(*"},
        {"\\\\p{N}{1,3}", "[a&&b]", kUnsupported, "&&"},
        {"\\\\p{N}{1,3}", "(a", kUnsupported, "(a"},
        {"\\\\p{N}{1,3}", std::string(20000, 'a'), kUnsupported, "bytes"},
        {"{\"type\": \"ByteLevel\"},\n\"decoder\"",
         "{\"type\": \"RobertaProcessing\"},\n\"decoder\"", kUnsupported, "RobertaProcessing"},
        {"\"decoder\": {\"type\": \"ByteLevel\"}", "\"decoder\": null", kUnsupported, "null"},
        {"\"decoder\": {\"type\": \"ByteLevel\"}", "\"decoder\": {\"type\": \"Metaspace\"}",
         kUnsupported, "Metaspace"},
        {"\"decoder\"", "\"coder\"", kUnsupported, "\"coder\""},
        {"\"normalizers\": []", "\"normalizers\": " + std::string(40, '[') + std::string(40, ']'),
         kCorrupt, "deep"},
        {"\"<|endoftext|>\"", "\"<|nothing|>\"", kUnsupported, "eos_token"},
        {"\"model\"", "\"model", kCorrupt, "no sound JSON"}};
    for (const Fault& fault : faults) {
        try {
            Tokenizer::from_model(changed(fault.what, fault.by), "hostile");
            ADD_FAILURE() << fault.by << " was taken";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), fault.code) << error.message();
            EXPECT_NE(error.message().find(fault.says), std::string::npos) << error.message();
            EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
            EXPECT_LT(error.message().size(), 500u);
        }
    }
}

TEST(TokenizerJson, SurvivesCutFiles) {
    for (std::size_t bytes = 1; bytes < kJson.size() - 1; bytes += 7) {
        EXPECT_THROW(Tokenizer::from_model(kJson.substr(0, bytes), "cut"), Error) << bytes;
    }
}

// A search that begins anew at every blank would be quadratic; a pattern like this exponential.
TEST(TokenizerJson, BoundsRegularExpressions) {
    const Tokenizer tokenizer =
        Tokenizer::from_model(changed("\\\\p{N}{1,3}", "(?:a|aa|a+)+b?[cd]"), "slow");
    EXPECT_BELLOWS_ERROR(tokenizer.encode(std::string(3000, 'a')), Unsupported,
                         "(?:a|aa|a+)+b?[cd]");
}

TEST(Tiktoken, RefusesBadLines) {
    TemporaryFolder folder;
    const auto open = [&](const std::string& model, const std::string& config) {
        folder.write("tiktoken.model", model);
        folder.write("tokenizer_config.json", config);
        return Tokenizer::from_folder(folder.path());
    };
    const std::string config =
        R"({"added_tokens_decoder": {"3": {"content": "[EOS]"}}, "eos_token": "[EOS]"})";
    const Tokenizer good = open("YQ== 0\nYg== 1\r\nYWI= 2\n", config); // a, b, ab
    EXPECT_EQ(good.encode("aab"), (std::vector<std::uint32_t>{0, 2}));
    EXPECT_EQ(good.end_of_document(), 3u);
    EXPECT_EQ(good.vocabulary(), 3u + 256u) << "reserved ids";
    EXPECT_EQ(good.id_of("<|reserved_token_4|>"), 4u);
    for (const auto& [model, says] :
         std::vector<std::pair<std::string, std::string>>{{"", "no tokens"},
                                                          {"YQ==\n", "line 1"},
                                                          {"YQ== x\n", "whole number"},
                                                          {"YQ== 1 2\n", "whole number"},
                                                          {"YQ= 0\n", "base64"},
                                                          {"Y=== 0\n", "base64"},
                                                          {"Y$== 0\n", "base64"},
                                                          {"YQ== 0\nYQ== 1\n", "line 2"},
                                                          {"YQ== 0\nYg== 0\n", "line 2"},
                                                          {"YQ== 16777216\n", "below"}}) {
        EXPECT_BELLOWS_ERROR(open(model, config), Corrupt, says);
    }
    EXPECT_BELLOWS_ERROR(open("YQ== 0\n", R"({"added_tokens_decoder": {"x": {"content": "y"}}})"),
                         Corrupt, "no id");
    EXPECT_BELLOWS_ERROR(open("YQ== 0\n", R"({"added_tokens_decoder": {"0": {"content": "y"}}})"),
                         Corrupt, "the same id");
}
