// SPDX-License-Identifier: MIT

// What is asked about a process while it ends: an answer, never an exception.

#include "world/process_state.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace bellows {
namespace {

TEST(ProcessState, AProcessThatEndsMeanwhileIsNotAlive) {
    std::atomic<pid_t> asked{::getpid()};
    std::atomic<bool> done{false};
    std::string failure;
    std::jthread asks([&] {
        try {
            while (!done) {
                const pid_t process = asked;
                is_stopped(process);
                is_alive(process);
                children_of(process);
                rank_of_process(process);
            }
        } catch (const std::exception& error) {
            failure = error.what();
        }
    });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (std::chrono::steady_clock::now() < end) {
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0)
            ::_exit(0);
        asked = child;
        ASSERT_EQ(::waitpid(child, nullptr, 0), child);
        ASSERT_FALSE(is_alive(child));
    }
    done = true;
    asks.join();
    EXPECT_EQ(failure, "");
}

TEST(ProcessState, SaysWhatIsSo) {
    EXPECT_TRUE(is_alive(::getpid()));
    EXPECT_FALSE(is_stopped(::getpid()));
    EXPECT_EQ(rank_of_process(::getpid()), -1);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0)
        for (;;)
            ::pause();
    EXPECT_TRUE(is_alive(child));
    EXPECT_EQ(children_of(::getpid()), std::vector<pid_t>{child});
    ::kill(child, SIGSTOP);
    ASSERT_EQ(::waitpid(child, nullptr, WUNTRACED), child);
    EXPECT_TRUE(is_stopped(child));
    ::kill(child, SIGKILL);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    EXPECT_FALSE(is_alive(child));
}

} // namespace
} // namespace bellows
