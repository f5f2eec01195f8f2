// SPDX-License-Identifier: MIT

// Who may join the control plane's mesh: ranks as threads of one process, one of them with a wrong
// key, or with strangers at the door. Both kinds of socket.

#include "comm/world/socket.hpp"
#include "thread_gather.hpp"

#include <bellows/comm/control_plane.hpp>

#include <gtest/gtest.h>

#include <array>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace bellows {
namespace {

using namespace std::chrono_literals;

using testing::ThreadGather;

constexpr int kRanks = ThreadGather::kRanks;

struct Outcome {
    bool joined = false;
    ErrorCode code = ErrorCode::Internal;
    std::string message;
};

// Every rank joins in a thread of its own and, once in, goes through a barrier.
std::array<Outcome, kRanks> join_all(ThreadGather& gather, bool force_tcp,
                                     std::chrono::milliseconds setup_timeout) {
    std::array<Outcome, kRanks> outcomes;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank)
        threads.emplace_back([&, rank] {
            Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
            try {
                ControlOptions options;
                options.setup_timeout = setup_timeout;
                options.force_tcp = force_tcp;
                ControlPlane control(rank, kRanks, options, gather.of(rank));
                control.barrier(10s);
                outcome.joined = true;
            } catch (const Error& error) {
                outcome.code = error.code();
                outcome.message = error.message();
            }
        });
    for (std::thread& thread : threads)
        thread.join();
    return outcomes;
}

std::string line(const std::string& card, int number) {
    std::istringstream in(card);
    std::string text;
    for (int i = 0; i <= number; ++i)
        std::getline(in, text);
    return text;
}

class Handshake : public ::testing::TestWithParam<bool> {};

TEST_P(Handshake, ThreadsJoinLikeRanks) {
    ThreadGather gather;
    for (const Outcome& outcome : join_all(gather, GetParam(), 20s))
        EXPECT_TRUE(outcome.joined) << outcome.message;
}

TEST_P(Handshake, AWrongKeyStaysOutside) {
    ThreadGather gather([](int rank, std::vector<std::string>& cards) {
        char& digit = cards[0].front(); // the job's key, or the port in the second exchange
        if (rank == 1 && cards[0].find('\n') != std::string::npos)
            digit = digit == '0' ? '1' : '0';
    });
    const auto outcomes = join_all(gather, GetParam(), 500ms);
    for (const Outcome& outcome : outcomes) {
        EXPECT_FALSE(outcome.joined);
        EXPECT_NE(outcome.message.find("rank 1"), std::string::npos) << outcome.message;
    }
    EXPECT_EQ(outcomes[0].code, ErrorCode::Timeout);
    EXPECT_EQ(outcomes[1].code, ErrorCode::Timeout);
}

TEST_P(Handshake, StrangersAtTheDoorDoNotDisturb) {
    std::vector<FileDescriptor> strangers;
    ThreadGather gather([&](int rank, std::vector<std::string>& cards) {
        if (rank != 0)
            return;
        // Before the others come: one who talks nonsense, one who hangs up.
        for (int i = 0; i < 2; ++i) {
            const Deadline soon(2000ms);
            const bool is_unix = cards[0].find('\n') != std::string::npos;
            if (is_unix == GetParam())
                continue;
            FileDescriptor socket =
                is_unix ? net::connect_unix(line(cards[0], 3), soon)
                        : net::connect_tcp("127.0.0.1",
                                           static_cast<std::uint16_t>(std::stoi(cards[0])), soon);
            ASSERT_TRUE(socket);
            if (i == 0) {
                const std::vector<std::byte> nonsense(64, std::byte{0x5a});
                EXPECT_TRUE(net::write_exact(socket.get(), nonsense, soon));
                strangers.push_back(std::move(socket));
            }
        }
    });
    for (const Outcome& outcome : join_all(gather, GetParam(), 20s))
        EXPECT_TRUE(outcome.joined) << outcome.message;
    EXPECT_EQ(strangers.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Sockets, Handshake, ::testing::Bool(),
                         [](const auto& tcp) { return std::string(tcp.param ? "Tcp" : "Unix"); });

} // namespace
} // namespace bellows
