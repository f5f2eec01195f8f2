// SPDX-License-Identifier: MIT

// A control plane that outlives lost ranks, ranks as threads of one process: one is called lost by
// one of the others only, and hears of it.

#include "thread_gather.hpp"

#include <bellows/comm/control_plane.hpp>

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace bellows {
namespace {

using namespace std::chrono_literals;
using testing::ThreadGather;

constexpr int kRanks = ThreadGather::kRanks, kSlow = 1;
constexpr std::uint64_t kTag = 7;

/// What went wrong on a rank, or nothing.
std::string run_rank(int rank, bool force_tcp, ThreadGather& gather) {
    ControlOptions options;
    options.force_tcp = force_tcp;
    options.outlive_lost_ranks = true;
    options.heartbeat_interval = rank == kSlow ? 60'000ms : 50ms;
    options.stall_timeout = rank == 0 ? 500ms : 0ms; // only rank 0 finds the slow one lost
    ControlPlane control(rank, kRanks, options, gather.of(rank));
    const auto until = [](const auto& condition) {
        for (int i = 0; i < 2000 && !condition(); ++i)
            std::this_thread::sleep_for(10ms);
        return condition();
    };
    if (rank == kSlow) {
        if (!until([&] { return control.failed(); }))
            return "the slow rank has not heard that it is lost";
        try {
            control.throw_if_failed();
        } catch (const Error& error) {
            if (error.code() != ErrorCode::PeerLost || error.rank() != kSlow)
                return error.message();
        }
        return {};
    }
    if (!until([&] { return control.lost(kSlow); }))
        return "rank " + std::to_string(rank) + " has not heard that the slow one is lost";
    // The two that are left go on.
    const int other = rank == 0 ? 2 : 0;
    control.send(other, kTag, {});
    control.recv(other, kTag, 20s);
    return control.failed() ? "the job has failed" : "";
}

class Outlive : public ::testing::TestWithParam<bool> {};

TEST_P(Outlive, ARankThatHearsThatItIsLostEndsAlone) {
    ThreadGather gather;
    std::array<std::string, kRanks> wrong;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank)
        threads.emplace_back([&, rank] {
            std::string& text = wrong[static_cast<std::size_t>(rank)];
            try {
                text = run_rank(rank, GetParam(), gather);
            } catch (const Error& error) {
                text = error.message();
            }
        });
    for (std::thread& thread : threads)
        thread.join();
    for (int rank = 0; rank < kRanks; ++rank)
        EXPECT_EQ(wrong[static_cast<std::size_t>(rank)], "") << "rank " << rank;
}

INSTANTIATE_TEST_SUITE_P(Sockets, Outlive, ::testing::Bool(),
                         [](const auto& tcp) { return std::string(tcp.param ? "Tcp" : "Unix"); });

} // namespace
} // namespace bellows
