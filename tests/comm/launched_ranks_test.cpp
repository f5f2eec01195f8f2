// SPDX-License-Identifier: MIT
// What the launcher knows of its ranks' processes.

#include "world/launched_ranks.hpp"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

namespace bellows {
namespace {

pid_t start_and_end() {
    const pid_t child = ::fork();
    if (child == 0)
        ::_exit(0);
    return child;
}

TEST(LaunchedRanks, NoticeAnEnd) {
    LaunchedRanks ranks(2);
    const pid_t child = start_and_end();
    ranks.meet(1, child);
    siginfo_t info{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
    EXPECT_EQ(ranks.ended_processes(), std::vector<int>{1});
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    EXPECT_EQ(ranks.ended_processes(), std::vector<int>{1});
}

// Its first report may be read after its parent has taken note of its end.
TEST(LaunchedRanks, NoticeAnEndBeforeTheyAreMet) {
    LaunchedRanks ranks(2);
    const pid_t child = start_and_end();
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    ranks.meet(0, child);
    EXPECT_EQ(ranks.ended_processes(), std::vector<int>{0});
    ranks[0].exit_code = 0;
    EXPECT_TRUE(ranks.ended_processes().empty());
}

} // namespace
} // namespace bellows
