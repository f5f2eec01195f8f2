// SPDX-License-Identifier: MIT

// Who may join the control plane's mesh: ranks as threads of one process, one of them with a wrong
// key, or with strangers at the door. Both kinds of socket.

#include "comm/world/socket.hpp"
#include "thread_gather.hpp"

#include <bellows/comm/control_plane.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <memory>
#include <sstream>
#include <string>
#include <sys/socket.h>
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

// More than may wait at once, so that the oldest have to go, and before any rank comes.
TEST_P(Handshake, SilentStrangersDoNotHoldUp) {
    constexpr int kSilent = 120;
    std::vector<FileDescriptor> strangers;
    ThreadGather gather([&](int rank, std::vector<std::string>& cards) {
        const bool is_unix = cards[0].find('\n') != std::string::npos;
        if (rank != 0 || is_unix == GetParam())
            return;
        for (int i = 0; i < kSilent; ++i) {
            const Deadline soon(2000ms);
            strangers.push_back(
                is_unix ? net::connect_unix(line(cards[0], 3), soon)
                        : net::connect_tcp("127.0.0.1",
                                           static_cast<std::uint16_t>(std::stoi(cards[0])), soon));
        }
    });
    const auto start = Clock::now();
    for (const Outcome& outcome : join_all(gather, GetParam(), 20s))
        EXPECT_TRUE(outcome.joined) << outcome.message;
    EXPECT_LT(Clock::now() - start, 4s) << "less than one of them may take";
    EXPECT_EQ(strangers.size(), static_cast<std::size_t>(kSilent));
}

INSTANTIATE_TEST_SUITE_P(Sockets, Handshake, ::testing::Bool(),
                         [](const auto& tcp) { return std::string(tcp.param ? "Tcp" : "Unix"); });

/// Stands between a rank and the one that it calls, and changes one byte of what the caller says.
class Tamperer {
public:
    Tamperer(std::string target, std::size_t changed)
        : target_(std::move(target)), changed_(changed) {
        std::array<std::byte, 8> random{};
        net::fill_random(random);
        name_ = "bellows-tamperer-";
        for (const std::byte byte : random)
            name_ += static_cast<char>('a' + std::to_integer<int>(byte) % 26);
        listener_ = net::listen_unix(name_, 8);
        thread_ = std::thread([this] { run(); });
    }
    ~Tamperer() {
        ends_ = true;
        thread_.join();
    }

    const std::string& name() const { return name_; }
    bool has_changed() const { return done_; }

private:
    void run() {
        const Deadline limit(20s);
        const FileDescriptor caller = net::accept(listener_.get(), limit);
        const FileDescriptor called = net::connect_unix(target_, limit);
        std::size_t passed = 0;
        const auto pass = [&](int from, int to, bool tampers) {
            std::array<std::byte, 4096> bytes;
            const ssize_t got = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
            if (got <= 0)
                return got < 0 && errno == EAGAIN;
            const auto size = static_cast<std::size_t>(got);
            if (tampers && passed <= changed_ && changed_ < passed + size) {
                bytes[changed_ - passed] ^= std::byte{1};
                done_ = true;
            }
            if (tampers)
                passed += size;
            return net::write_exact(to, std::span(bytes).first(size), limit);
        };
        while (!ends_ && !limit.expired()) {
            if (!pass(caller.get(), called.get(), true) || !pass(called.get(), caller.get(), false))
                return;
            std::this_thread::sleep_for(1ms);
        }
    }

    std::string target_, name_;
    std::size_t changed_;
    FileDescriptor listener_;
    std::atomic<bool> ends_{false}, done_{false};
    std::thread thread_;
};

class TamperedFrame : public ::testing::TestWithParam<std::size_t> {};

TEST_P(TamperedFrame, EndsTheJobWithTheNameOfThePeer) {
    constexpr std::size_t kIntroduction = 32 + 16; // what the caller says before its first frame
    std::unique_ptr<Tamperer> tamperer;
    ThreadGather gather([&](int rank, std::vector<std::string>& cards) {
        if (rank != 1)
            return;
        const std::string name = line(cards[0], 3);
        tamperer = std::make_unique<Tamperer>(name, kIntroduction + GetParam());
        cards[0].replace(cards[0].find(name), name.size(), tamperer->name());
    });
    const auto outcomes = join_all(gather, false, 20s);
    ASSERT_TRUE(tamperer->has_changed());
    for (const Outcome& outcome : outcomes) {
        EXPECT_FALSE(outcome.joined);
        EXPECT_EQ(outcome.code, ErrorCode::PeerLost) << outcome.message;
        EXPECT_EQ(outcome.message.rfind("the control connection of rank 1 (pid ", 0), 0u)
            << outcome.message;
        EXPECT_NE(outcome.message.find("a frame with a wrong tag"), std::string::npos)
            << outcome.message;
    }
}

INSTANTIATE_TEST_SUITE_P(Bytes, TamperedFrame,
                         ::testing::Values(0, 9, 30), // kind, tag, and behind the header
                         [](const auto& byte) { return std::to_string(byte.param); });

} // namespace
} // namespace bellows
