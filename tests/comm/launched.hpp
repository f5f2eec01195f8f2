// SPDX-License-Identifier: MIT
#pragma once

// Tests of failures launch themselves through mpirun as `<program> --rank <phase> <fault>
// <folder>`. Every rank that ends with an Error writes down what it saw; the test reads it.

#include <bellows/base/error.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/comm/world.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>

namespace bellows::testing {

using SteadyClock = std::chrono::steady_clock;

/// What a rank saw: its error, and how long after `start` it came.
inline void write_seen(const std::string& folder, int rank, const Error& error,
                       SteadyClock::time_point start) {
    const auto waited =
        std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock::now() - start);
    std::ofstream(folder + "/rank" + std::to_string(rank))
        << to_string(error.code()) << ' ' << error.rank() << ' ' << waited.count() << ' '
        << error.message() << '\n';
}

struct Seen {
    std::string code;
    int rank = -2;
    long milliseconds = -1;
    std::string message;

    bool says(const std::string& part) const { return message.find(part) != std::string::npos; }
};

/// A barrier that the culprit leaves last: whatever it does then, it meets nobody who is still in
/// it.
inline void barrier_left_last_by(World& world, int culprit) {
    constexpr std::uint32_t kTag = 999;
    constexpr auto kLimit = std::chrono::seconds(60);
    world.control().barrier(kLimit);
    if (world.rank() != culprit) {
        world.control().send(culprit, kTag, {});
        return;
    }
    for (int rank = 0; rank < world.size(); ++rank)
        if (rank != culprit)
            world.control().recv(rank, kTag, kLimit);
}

class Launched : public ::testing::Test {
protected:
    void SetUp() override {
        std::string name =
            (std::filesystem::temp_directory_path() / "bellows-fault-XXXXXX").string();
        ASSERT_NE(::mkdtemp(name.data()), nullptr);
        folder_ = name;
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }

    LaunchResult launch(int ranks, const std::string& phase, const std::string& fault,
                        std::chrono::milliseconds grace = std::chrono::seconds(3)) {
        LaunchOptions options;
        options.ranks = ranks;
        options.command = {std::filesystem::read_symlink("/proc/self/exe").string(), "--rank",
                           phase, fault, folder_};
        options.grace = grace;
        options.stopped_timeout = stopped_timeout_;
        options.together_timeout = together_timeout_;
        const auto start = SteadyClock::now();
        const LaunchResult result = launch_ranks(options);
        took_ = SteadyClock::now() - start;
        return result;
    }

    Seen seen(int rank) const {
        Seen result;
        std::ifstream file(folder_ + "/rank" + std::to_string(rank));
        file >> result.code >> result.rank >> result.milliseconds;
        std::getline(file >> std::ws, result.message);
        return result;
    }

    std::string folder_;
    std::chrono::milliseconds stopped_timeout_ = LaunchOptions{}.stopped_timeout;
    std::chrono::milliseconds together_timeout_ = LaunchOptions{}.together_timeout;
    SteadyClock::duration took_{};
};

} // namespace bellows::testing
