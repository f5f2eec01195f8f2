// SPDX-License-Identifier: MIT
// The same global batch and seed on several layouts of ranks: the same losses, but for the order in
// which f32 sums are formed; and twice the same layout: the same bits. BELLOWS_E2E_STEPS changes
// the length of the runs: builds with sanitizers cannot afford it.
#include "e2e/runs.hpp"

#include <cmath>
#include <cstdlib>
#include <memory>
#include <ostream>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

struct Layout {
    const char* name;
    Flags flags;
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
    return out << layout.name;
}

std::string number_of_steps() {
    const char* text = std::getenv("BELLOWS_E2E_STEPS");
    return text != nullptr ? text : "25";
}

const Flags kOneRank = {"--ranks", "1"};

class Layouts : public testing::TestWithParam<Layout> {
protected:
    static void SetUpTestSuite() {
        workspace_ = std::make_unique<Workspace>();
        one_rank_ = workspace_->train("one-rank", flags(kOneRank));
    }
    static void TearDownTestSuite() { workspace_.reset(); }
    static Flags flags(Flags layout) {
        layout.insert(layout.end(), {"--steps", number_of_steps(), "--seed", "7"});
        return layout;
    }

    static std::unique_ptr<Workspace> workspace_;
    static fs::path one_rank_;
};

std::unique_ptr<Workspace> Layouts::workspace_;
fs::path Layouts::one_rank_;

} // namespace

TEST_P(Layouts, LearnTheSameAndRepeatTheirBits) {
    const bool is_reference = GetParam().flags == kOneRank;
    const fs::path first =
        is_reference ? one_rank_ : workspace_->train("first", flags(GetParam().flags));
    const fs::path again = workspace_->train("again", flags(GetParam().flags));
    EXPECT_EQ(printed_steps(first), printed_steps(again));
    EXPECT_TRUE(same_tensors(first, again));
    const auto expected = steps_of(one_rank_), got = steps_of(first);
    fs::remove_all(again);
    if (!is_reference)
        fs::remove_all(first);
    ASSERT_EQ(got.size(), expected.size());
    ASSERT_EQ(std::to_string(got.size()), number_of_steps());
    for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i].step, i + 1);
        ASSERT_TRUE(std::isfinite(got[i].loss)) << got[i].printed;
        const double tolerance = i == 0 ? 1e-5 : 1e-3; // relative; rounding grows with the steps
        EXPECT_LE(std::abs(got[i].loss - expected[i].loss), tolerance * expected[i].loss)
            << "step " << i + 1 << ": " << got[i].loss << ", one rank has " << expected[i].loss;
    }
}

INSTANTIATE_TEST_SUITE_P(
    OfRanks, Layouts,
    testing::Values(Layout{"ranks1", kOneRank}, Layout{"dp4_ep4", {"--ranks", "4"}},
                    Layout{"pp2_dp2_ep2", {"--ranks", "4", "--pp", "2", "--micro-batches", "2"}},
                    Layout{"dp2_ep1", {"--ranks", "2", "--dp", "2", "--ep", "1"}}),
    [](const auto& layout) { return std::string(layout.param.name); });

// What the comparisons above stand on: the loss moves, and another seed gives another run.
TEST_F(Layouts, TheLossFallsAndDependsOnTheSeed) {
    const auto steps = steps_of(one_rank_);
    ASSERT_GE(steps.size(), 2u);
    EXPECT_NEAR(steps.front().loss, std::log(256.0), 0.2) << "a fresh model guesses";
    EXPECT_LT(steps.back().loss, steps.front().loss - 0.3);
    const fs::path other =
        workspace_->train("other", {"--ranks", "1", "--steps", "1", "--seed", "8"});
    EXPECT_GT(std::abs(steps_of(other).at(0).loss - steps.front().loss), 1e-5);
}
