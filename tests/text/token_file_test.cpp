// SPDX-License-Identifier: MIT
// Tokens in a file, and that they depend neither on threads nor on where blocks end.
#include "support/temporary_folder.hpp"
#include "text/small_model.hpp"

#include <bellows/base/mapped_file.hpp>
#include <bellows/text/corpus.hpp>

#include <fstream>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

std::vector<std::uint32_t> all_tokens(const Corpus& corpus) {
    std::vector<std::uint32_t> out(corpus.num_tokens());
    corpus.copy(0, out);
    return out;
}

TextFiles find(const fs::path& path) {
    return find_text(std::span(&path, 1));
}

/// Longer than several blocks: short lines, one without an end, and runs of newlines and spaces.
std::string long_text() {
    std::string text;
    for (int i = 0; text.size() < 1'300'000; ++i) {
        text += "the forge of number " + std::to_string(i * 37 % 101) + "  breathes slowly";
        text += i % 11 == 0 ? "\n\n\n" : i % 7 == 0 ? "   \n" : i % 5 == 0 ? "\n  " : "\n";
    }
    text += std::string(200'000, 'f');
    while (text.size() < 2'500'000) {
        text += " breathes \xc3\xa4hnlich";
    }
    return text;
}

} // namespace

TEST(TokenFile, HasTheTokensOfTheWholeTextWhateverTheThreads) {
    TemporaryFolder folder;
    const std::string text = long_text();
    folder.write("text/a.txt", "the forge");
    folder.write("text/b.txt", text);
    folder.write("text/c.bin", std::string("x\0y", 3));
    folder.write("text/d.txt", "breathes slowly\n");
    const TextFiles files = find(folder.path() / "text");
    for (const Tokenizer& tokenizer :
         {Tokenizer::bytes(), Tokenizer::from_name(small_model(folder, ""))}) {
        std::vector<std::uint32_t> expected;
        for (const std::string_view document :
             {std::string_view("the forge"), std::string_view(text),
              std::string_view("breathes slowly\n")}) {
            const std::vector<std::uint32_t> ids = tokenizer.encode(document);
            expected.insert(expected.end(), ids.begin(), ids.end());
            expected.push_back(tokenizer.end_of_document());
        }
        const fs::path file = folder.path() / "tokens.bin";
        std::vector<std::uint64_t> contents;
        for (const unsigned threads : {1u, 2u, 5u}) {
            std::uint64_t last = 0;
            const Corpus corpus = Corpus::make(
                file, files, tokenizer, {threads, [&](std::uint64_t done, std::uint64_t total) {
                                             EXPECT_LE(last, done);
                                             EXPECT_EQ(total, files.bytes());
                                             last = done;
                                         }});
            EXPECT_EQ(last, files.bytes());
            EXPECT_EQ(all_tokens(corpus), expected) << tokenizer.name() << " " << threads;
            EXPECT_EQ(corpus.num_documents(), 3u);
            EXPECT_EQ(corpus.num_text_bytes(), text.size() + 9 + 16);
            EXPECT_NE(describe(corpus).find("skipped 1 (binary 1)"), std::string::npos);
            contents.push_back(corpus.content());
        }
        EXPECT_EQ(contents, std::vector<std::uint64_t>(3, contents.front()));
        EXPECT_EQ(all_tokens(Corpus::read(files, tokenizer)), expected);
    }
}

TEST(TokenFile, IsFoundAgainUnlessTextOrTokenizerChanged) {
    TemporaryFolder folder;
    const fs::path text = folder.write("text/a.txt", "text of some length");
    const fs::path file = folder.path() / "tokens.bin";
    const Tokenizer tokenizer = Tokenizer::bytes();
    const TextFiles files = find(text);
    const std::uint64_t made_from = fingerprint(files, tokenizer);
    EXPECT_FALSE(Corpus::open(file, made_from, files));
    const std::vector<std::uint32_t> tokens = all_tokens(Corpus::make(file, files, tokenizer));
    const auto again = Corpus::open(file, made_from, files);
    ASSERT_TRUE(again);
    EXPECT_EQ(all_tokens(*again), tokens);
    EXPECT_EQ(describe(*again), "1 document, 19 B");
    EXPECT_FALSE(Corpus::open(file, made_from + 1, files));
    const Tokenizer other = Tokenizer::from_name(small_model(folder, ""));
    EXPECT_NE(fingerprint(files, other), made_from);

    // The same length at another time, another length, another name.
    folder.write("text/a.txt", "TEXT of some length");
    fs::last_write_time(text, fs::last_write_time(text) + std::chrono::seconds(2));
    EXPECT_NE(fingerprint(find(text), tokenizer), made_from);
    EXPECT_EQ(all_tokens(*again), tokens) << "an open file stays as it was";
    // Only its own file is left behind.
    (void)Corpus::make(file, find(text), tokenizer);
    EXPECT_EQ(all_tokens(*again), tokens) << "replaced, not overwritten";
    for (const auto& entry : fs::directory_iterator(folder.path())) {
        EXPECT_FALSE(entry.path().filename().string().starts_with(".tokens"));
    }
}

TEST(TokenFile, OfDamageIsMadeAnewOrRefused) {
    TemporaryFolder folder;
    const fs::path text = folder.write("a.txt", std::string(5000, 'a'));
    const fs::path file = folder.path() / "tokens.bin";
    const Tokenizer tokenizer = Tokenizer::from_name(small_model(folder, ""));
    const TextFiles files = find(text);
    const std::uint64_t made_from = fingerprint(files, tokenizer);
    (void)Corpus::make(file, files, tokenizer);
    const std::string good = content_of(file);
    for (const std::size_t bytes :
         {std::size_t{0}, std::size_t{10}, std::size_t{71}, good.size() - 1, good.size() + 1}) {
        std::string changed = good;
        changed.resize(bytes);
        folder.write("tokens.bin", changed);
        EXPECT_FALSE(Corpus::open(file, made_from, files)) << bytes;
    }
    for (const std::size_t byte : {0u, 8u, 12u, 35u, 71u}) { // magic ... number of tokens
        std::string changed = good;
        changed[byte] = static_cast<char>(changed[byte] ^ 0x7f);
        folder.write("tokens.bin", changed);
        EXPECT_FALSE(Corpus::open(file, made_from, files)) << byte;
    }
    std::string changed = good;
    changed.back() = '\xff';
    folder.write("tokens.bin", changed);
    const auto corpus = Corpus::open(file, made_from, files);
    ASSERT_TRUE(corpus);
    EXPECT_BELLOWS_ERROR(all_tokens(*corpus), Corrupt, "remove it");
}

TEST(TokenFile, FailsWithoutALeftover) {
    TemporaryFolder folder;
    const fs::path text = folder.write("a.txt", std::string(2'000'000, 'a') + std::string(1, '\0'));
    const Tokenizer tokenizer = Tokenizer::bytes();
    fs::create_directory(folder.path() / "out");
    const fs::path file = folder.path() / "out" / "tokens.bin";
    EXPECT_BELLOWS_ERROR(Corpus::make(file, find(text), tokenizer), InvalidArgument, "binary");
    EXPECT_TRUE(fs::is_empty(folder.path() / "out"));
    folder.write("a.txt", std::string(2'000'000, 'a'));
    EXPECT_BELLOWS_ERROR(Corpus::make(folder.path() / "none" / "tokens.bin", find(text), tokenizer),
                         Io, "cannot create");
    // A callback that throws ends the work.
    struct Stop {};
    EXPECT_THROW(Corpus::make(file, find(text), tokenizer,
                              {1, [](std::uint64_t, std::uint64_t) { throw Stop(); }}),
                 Stop);
    EXPECT_TRUE(fs::is_empty(folder.path() / "out"));
    TextFiles longer = find(text);
    longer.files.front().bytes += 5;
    EXPECT_BELLOWS_ERROR(Corpus::make(file, longer, tokenizer), Corrupt, "too early");
    EXPECT_TRUE(fs::is_empty(folder.path() / "out"));
}

// Pieces of a word, of a line, of the whole: the same, for every kind of normaliser.
TEST(Encoding, HasTheTokensOfTheWholeText) {
    TemporaryFolder folder;
    const std::string text =
        "the forge  breathes\n\n slowly, of   number 7 \nthe\tbreathes\n forge";
    for (const char* flags :
         {"", "--add_dummy_prefix=false", "--model_type=bpe", "--normalization_rule_name=identity",
          "--normalization_rule_name=identity --remove_extra_whitespaces=false "
          "--byte_fallback=true",
          "--normalization_rule_name=identity --remove_extra_whitespaces=false "
          "--add_dummy_prefix=false --byte_fallback=true --model_type=bpe",
          "--treat_whitespace_as_suffix=true", "--split_by_whitespace=false"}) {
        const std::string model = small_model(folder, flags);
        const Tokenizer tokenizer = Tokenizer::from_name(model);
        EXPECT_EQ(tokenizer.encode(text), encoded_at_once(model, text)) << flags;
    }
}

TEST(MappedFile, IsEmptyOrRefused) {
    TemporaryFolder folder;
    const fs::path file = folder.write("a", "abc");
    MappedFile mapped(file);
    EXPECT_EQ(mapped.bytes().size(), 3u);
    MappedFile moved(std::move(mapped));
    EXPECT_EQ(static_cast<char>(moved.bytes()[2]), 'c');
    EXPECT_TRUE(MappedFile(folder.write("empty", "")).bytes().empty());
    EXPECT_BELLOWS_ERROR(MappedFile(folder.path() / "none"), Io, "none");
    EXPECT_BELLOWS_ERROR(MappedFile(folder.path()), Io, "regular");
}
