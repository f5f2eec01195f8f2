// SPDX-License-Identifier: MIT
// The ranks of a run share one file of tokens, hosts without a common folder have one each.
#include "app/train/training_text.hpp"
#include "support/mpi_test.hpp"
#include "support/shared_folder.hpp"

#include <string>
#include <vector>

using namespace bellows;
using bellows::testing::world;
namespace fs = std::filesystem;

namespace {

TrainOptions options_of(const fs::path& data, const fs::path& out) {
    TrainOptions options;
    options.config.train.data = {data.string()};
    options.config.train.batch = 2;
    options.config.train.seq = 8;
    options.out = out;
    return options;
}

/// Collective: made by rank 0, there for all when it returns.
void write(const fs::path& file, const std::string& content) {
    if (world().rank() == 0) {
        fs::create_directories(file.parent_path());
        std::ofstream(file, std::ios::binary) << content;
    }
    world().control().barrier(std::chrono::seconds(60), "writing");
}

std::string own_host() {
    return "host" + std::to_string(world().node());
}

} // namespace

TEST(TrainingText, IsSharedByRanks) {
    const SharedFolder folder;
    write(folder.path() / "out" / "none", "");
    write(folder.path() / "a.txt", "one text for all ranks");
    const TrainOptions options = options_of(folder.path() / "a.txt", folder.path() / "out");
    for (const bool made : {true, false}) { // found again the second time
        int reports = 0;
        const Corpus corpus = training_text(options, Tokenizer::bytes(), world(),
                                            [&](std::uint64_t, std::uint64_t) { ++reports; });
        EXPECT_EQ(reports > 0, made && world().rank() == 0);
        std::vector<std::uint32_t> tokens(corpus.num_tokens());
        corpus.copy(0, tokens);
        EXPECT_EQ(Tokenizer::bytes().decode(tokens), "one text for all ranks");
    }
}

TEST(TrainingText, IsMadeOnEveryHostWithoutACommonFolder) {
    const SharedFolder folder;
    write(folder.path() / "a.txt", "one text for all ranks");
    write(folder.path() / "host0" / "none", "");
    const TrainOptions options = options_of(folder.path() / "a.txt", folder.path() / own_host());
    const Corpus corpus = training_text(options, Tokenizer::bytes(), world(), {});
    EXPECT_EQ(corpus.num_tokens(), 23u);
    EXPECT_TRUE(fs::exists(options.out / kTokensFile));
    world().control().barrier(std::chrono::seconds(60), "looking"); // before the folder goes
}

TEST(TrainingText, OfOneRankThatFailsFailsEverywhere) {
    const SharedFolder folder;
    write(folder.path() / "out" / "none", "");
    const TrainOptions options = options_of(folder.path() / "b.txt", folder.path() / "out");
    EXPECT_BELLOWS_ERROR(training_text(options, Tokenizer::bytes(), world(), {}), InvalidArgument,
                         "does not exist");
}

TEST(TrainingText, ThatDiffersBetweenHostsIsRefused) {
    const SharedFolder folder;
    for (int node = 0; node < world().num_nodes(); ++node) {
        const fs::path host = folder.path() / ("host" + std::to_string(node));
        write(host / "text" / "a.txt", "a text of host number " + std::to_string(node));
        write(host / "out" / "none", "");
    }
    const fs::path host = folder.path() / own_host();
    const TrainOptions options = options_of(host / "text", host / "out");
    if (world().num_nodes() == 1) {
        EXPECT_NO_THROW(training_text(options, Tokenizer::bytes(), world(), {}));
        return;
    }
    EXPECT_BELLOWS_ERROR(training_text(options, Tokenizer::bytes(), world(), {}), InvalidArgument,
                         "not the same on all hosts");
}
