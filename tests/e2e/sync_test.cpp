// SPDX-License-Identifier: MIT
// The same bits whether work overlaps, runs one piece after another, or in a shuffled order, and
// with a queue for each role.
#include "e2e/runs.hpp"

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

class Sync : public testing::TestWithParam<Layout> {};

} // namespace

TEST_P(Sync, SerialAndShuffledEqualOverlapped) {
    const Workspace workspace;
    Flags flags = GetParam().flags;
    flags.insert(flags.end(), {"--steps", "6"});
    const fs::path overlap = workspace.train("overlap", flags, {{"BELLOWS_SYNC", "overlap"}});
    ASSERT_EQ(steps_of(overlap).size(), 6u);
    for (const char* mode : {"serial", "shuffle:1"}) {
        SCOPED_TRACE(mode);
        const fs::path other = workspace.train(mode, flags, {{"BELLOWS_SYNC", mode}});
        EXPECT_EQ(printed_steps(other), printed_steps(overlap));
        EXPECT_TRUE(same_tensors(other, overlap));
    }
    const fs::path apart = workspace.train(
        "apart", flags,
        {{"BELLOWS_ROLES_APART", "1"}, {"BELLOWS_CHECK", "1"}, {"BELLOWS_SYNC", "shuffle:2"}});
    EXPECT_EQ(printed_steps(apart), printed_steps(overlap));
    EXPECT_TRUE(same_tensors(apart, overlap));
}

TEST(SyncVariable, IsRead) {
    const Workspace workspace;
    expect_one_line(workspace.bellows(workspace.train_arguments("odd", {"--steps", "1"}),
                                      {{"BELLOWS_SYNC", "sometimes"}}),
                    2, "BELLOWS_SYNC");
}

INSTANTIATE_TEST_SUITE_P(
    OfRanks, Sync,
    testing::Values(
        Layout{"dp2_ep2", {"--ranks", "2"}},
        Layout{"pp2_micro4", {"--ranks", "2", "--pp", "2", "--micro-batches", "4"}},
        Layout{"dualpipe_pp2",
               {"--ranks", "2", "--pp", "2", "--micro-batches", "4", "--pipeline", "dualpipe"}},
        Layout{"pairs_ep2", {"--ranks", "2", "--micro-batches", "2", "--pipeline", "dualpipev"}}),
    [](const auto& layout) { return std::string(layout.param.name); });
