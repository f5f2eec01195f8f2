// SPDX-License-Identifier: MIT
#include "support/temporary_folder.hpp"
#include "text/small_model.hpp"

#include <bellows/text/corpus.hpp>
#include <bellows/train/sequence_source.hpp>

#include <map>
#include <set>
#include <string>
#include <vector>

#include <sys/stat.h>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

std::vector<std::uint32_t> all_tokens(const Corpus& corpus) {
    std::vector<std::uint32_t> out(corpus.num_tokens());
    corpus.copy(0, out);
    return out;
}

Corpus read(const std::vector<fs::path>& paths) {
    return Corpus::read(paths, Tokenizer::bytes());
}

/// Text without a repeated window, so that a sequence tells where it was cut.
std::string counting_text(std::size_t bytes) {
    std::string text;
    for (int i = 0; text.size() < bytes; ++i) {
        text += std::to_string(i) + " ";
    }
    text.resize(bytes);
    return text;
}

} // namespace

TEST(Tokenizer, BytesGoThereAndBack) {
    const Tokenizer tokenizer = Tokenizer::bytes();
    EXPECT_EQ(tokenizer.vocabulary(), 256u);
    std::string text;
    for (int byte = 1; byte < 256; ++byte) {
        text.push_back(static_cast<char>(byte));
    }
    const std::vector<std::uint32_t> ids = tokenizer.encode(text);
    ASSERT_EQ(ids.size(), text.size());
    EXPECT_EQ(ids.front(), 1u);
    EXPECT_EQ(ids.back(), 255u);
    EXPECT_EQ(tokenizer.decode(ids), text);
    EXPECT_EQ(tokenizer.decode(std::vector<std::uint32_t>{'a', 0, 'b'}), "ab");
    EXPECT_BELLOWS_ERROR(tokenizer.decode(std::vector<std::uint32_t>{256}), InvalidArgument, "256");
}

TEST(Tokenizer, SentencepieceGoesThereAndBack) {
    TemporaryFolder folder;
    const Tokenizer tokenizer = Tokenizer::from_name(small_model(folder, ""));
    EXPECT_GT(tokenizer.vocabulary(), 10u);
    EXPECT_LE(tokenizer.vocabulary(), 60u);
    const std::vector<std::uint32_t> ids = tokenizer.encode("the forge breathes slowly");
    EXPECT_LT(ids.size(), 25u) << "pieces should be longer than letters";
    EXPECT_EQ(tokenizer.decode(ids), "the forge breathes slowly");

    const std::vector<fs::path> paths = {folder.path() / "train-model.txt"};
    const Corpus corpus = Corpus::read(paths, tokenizer);
    EXPECT_GT(corpus.bytes_per_token(), 1.0);
    EXPECT_EQ(all_tokens(corpus).back(), tokenizer.end_of_document());
}

TEST(Tokenizer, RefusesWhatIsNoModel) {
    TemporaryFolder folder;
    const fs::path file = folder.write("wrong.model", "this is not a model");
    EXPECT_BELLOWS_ERROR(Tokenizer::from_name(file.string()), Corrupt, "wrong.model");
    EXPECT_BELLOWS_ERROR(Tokenizer::from_name((folder.path() / "none.model").string()), Io,
                         "none.model");
}

TEST(Corpus, ReadsFoldersSortedAndSkipsWhatIsNoText) {
    TemporaryFolder folder;
    folder.write("b.txt", "bb");
    folder.write("a/z.txt", "zz");
    folder.write("a/Y.txt", "yy");
    folder.write("c.bin", std::string("x\0y", 3));
    folder.write("empty.txt", "");
    folder.write(".git/config", "hidden");
    fs::create_symlink("b.txt", folder.path() / "link.txt");
    ASSERT_EQ(::mkfifo((folder.path() / "pipe").c_str(), 0600), 0);

    const Corpus corpus = read({folder.path()});
    EXPECT_EQ(corpus.num_documents(), 3u);
    const std::vector<std::uint32_t> expected = {'y', 'y', 0, 'z', 'z', 0, 'b', 'b', 0};
    EXPECT_EQ(all_tokens(corpus), expected);

    std::map<std::string, std::string> skipped;
    for (const SkippedFile& file : corpus.skipped()) {
        skipped[file.path.filename().string()] = file.reason;
    }
    const std::map<std::string, std::string> reasons = {{"c.bin", "binary"},
                                                        {"empty.txt", "empty"},
                                                        {".git", "hidden"},
                                                        {"link.txt", "symbolic link"},
                                                        {"pipe", "not a regular file"}};
    EXPECT_EQ(skipped, reasons);
    folder.write("d.bin", std::string(1, '\0'));
    EXPECT_EQ(describe(read({folder.path()})),
              "3 documents, 6 B; skipped 6 (binary 2, empty 1, hidden 1, not a regular file 1, "
              "symbolic link 1)");
    EXPECT_EQ(describe(read({folder.path() / "b.txt"})), "1 document, 2 B");
}

TEST(Corpus, ReadsAFileOnceHoweverItIsReached) {
    TemporaryFolder folder;
    const fs::path file = folder.write("a.txt", "text");
    fs::create_symlink("a.txt", folder.path() / "named.txt");
    const Corpus corpus = read({folder.path() / "named.txt", folder.path(), file});
    EXPECT_EQ(corpus.num_documents(), 1u);
    EXPECT_EQ(corpus.num_text_bytes(), 4u);
}

TEST(Corpus, RefusesMissingEmptyAndBinaryData) {
    TemporaryFolder folder;
    const fs::path binary = folder.write("x.bin", std::string(3, '\0'));
    const fs::path empty = folder.write("empty.txt", "");
    fs::create_directory(folder.path() / "nothing");
    fs::path fifo = folder.path() / "pipe";
    ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
    EXPECT_BELLOWS_ERROR(read({}), InvalidArgument, "no data");
    EXPECT_BELLOWS_ERROR(read({folder.path() / "none"}), InvalidArgument, "does not exist");
    EXPECT_BELLOWS_ERROR(read({binary}), InvalidArgument, "binary");
    EXPECT_BELLOWS_ERROR(read({empty}), InvalidArgument, "no text");
    EXPECT_BELLOWS_ERROR(read({folder.path() / "nothing"}), InvalidArgument, "no text");
    EXPECT_BELLOWS_ERROR(read({fifo}), Io, "regular file");
    EXPECT_BELLOWS_ERROR(read({empty / "below"}), InvalidArgument, "does not exist");
}

TEST(Corpus, ErrorsStayOnOneLine) {
    EXPECT_BELLOWS_ERROR(read({"/does/not\nexist"}), InvalidArgument, "\\x0a");
}

TEST(ShuffledSequences, DealsEverySequenceOnceAnEpoch) {
    const Corpus corpus = Corpus::from_text(counting_text(5000), Tokenizer::bytes());
    for (const std::uint64_t length : {1u, 7u, 64u, 2400u, 5000u}) {
        const ShuffledSequences source(corpus, {0, corpus.num_tokens()}, {3, 4, length});
        const std::uint64_t per_epoch = source.sequences_per_epoch();
        ASSERT_GE(per_epoch, 1u);
        for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
            std::set<std::uint64_t> starts;
            for (std::uint64_t i = epoch * per_epoch; i < (epoch + 1) * per_epoch; ++i) {
                const std::uint64_t start = source.sequence_start(i / 4, i % 4);
                ASSERT_LE(start + length + 1, corpus.num_tokens());
                starts.insert(start);
            }
            ASSERT_EQ(starts.size(), per_epoch);
            // Neighbours in place are one sequence apart: the epoch covers the text without gaps.
            EXPECT_EQ(*starts.rbegin() - *starts.begin(), (per_epoch - 1) * length);
        }
    }
}

TEST(ShuffledSequences, DependsOnSeedAndStepAlone) {
    const Corpus corpus = Corpus::from_text(counting_text(20000), Tokenizer::bytes());
    const TokenRange range{100, 15000};
    const ShuffledSequences one(corpus, range, {7, 8, 32});
    const ShuffledSequences again(corpus, range, {7, 8, 32});
    const ShuffledSequences other(corpus, range, {8, 8, 32});
    std::vector<std::uint32_t> a(33);
    std::vector<std::uint32_t> b(33);
    int differing = 0;
    for (std::uint64_t step = 200; step-- > 0;) { // backwards: no state may matter
        for (std::uint64_t index = 0; index < 8; ++index) {
            one(199 - step, index, a);
            again(199 - step, index, b);
            ASSERT_EQ(a, b);
            ASSERT_EQ(one.sequence_start(step, index), again.sequence_start(step, index));
            ASSERT_GE(one.sequence_start(step, index), range.first);
            ASSERT_LE(one.sequence_start(step, index) + 33, range.first + range.count);
            differing += one.sequence_start(step, index) != other.sequence_start(step, index);
        }
    }
    EXPECT_GT(differing, 1500);
}

// The order is part of what a checkpoint promises: these numbers must not change.
TEST(ShuffledSequences, KeepsItsOrderFromReleaseToRelease) {
    const Corpus corpus = Corpus::from_text(counting_text(10000), Tokenizer::bytes());
    const ShuffledSequences source(corpus, {0, corpus.num_tokens()}, {1, 4, 64});
    std::vector<std::uint64_t> starts;
    for (const std::uint64_t step : {0u, 1u, 1000u}) {
        for (std::uint64_t index = 0; index < 4; ++index) {
            starts.push_back(source.sequence_start(step, index));
        }
    }
    const std::vector<std::uint64_t> expected = {8707, 2563, 5251, 5891, 4227, 8835,
                                                 4739, 4675, 8551, 6887, 9191, 1511};
    EXPECT_EQ(starts, expected);
}

TEST(ShuffledSequences, RefusesTextShorterThanASequence) {
    const Corpus corpus = Corpus::from_text("0123456789", Tokenizer::bytes()); // and its end: 11
    EXPECT_NO_THROW(ShuffledSequences(corpus, {0, 11}, {1, 4, 10}));
    EXPECT_BELLOWS_ERROR(ShuffledSequences(corpus, {0, 11}, {1, 4, 11}), InvalidArgument,
                         "11 tokens");
    EXPECT_BELLOWS_ERROR(ShuffledSequences(corpus, {0, 12}, {1, 4, 4}), InvalidArgument, "range");
    EXPECT_BELLOWS_ERROR(ShuffledSequences(corpus, {12, 0}, {1, 4, 4}), InvalidArgument, "range");
    EXPECT_BELLOWS_ERROR(ShuffledSequences(corpus, {0, 11}, {1, 0, 4}), InvalidArgument,
                         "positive");
    const ShuffledSequences source(corpus, {0, 11}, {1, 4, 4});
    EXPECT_BELLOWS_ERROR(source.sequence_start(0, 4), InvalidArgument, "sequence 4");
    EXPECT_BELLOWS_ERROR(source.sequence_start(~std::uint64_t{0}, 0), InvalidArgument, "step");
    std::vector<std::uint32_t> small(4);
    EXPECT_BELLOWS_ERROR(source(0, 0, small), InvalidArgument, "room");
}

TEST(ShuffledSequences, HoldsOutTheEnd) {
    const Corpus corpus = Corpus::from_text(counting_text(999), Tokenizer::bytes());
    const DataSplit split = split_corpus(corpus, 0.1);
    EXPECT_EQ(split.train.count, 900u);
    EXPECT_EQ(split.holdout.first, 900u);
    EXPECT_EQ(split.holdout.count, 100u);
    EXPECT_EQ(split_corpus(corpus, 0).train.count, 1000u);
    EXPECT_BELLOWS_ERROR(split_corpus(corpus, 1), InvalidArgument, "fraction");
    EXPECT_BELLOWS_ERROR(split_corpus(corpus, -0.1), InvalidArgument, "fraction");
}
