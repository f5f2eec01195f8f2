// SPDX-License-Identifier: MIT
#pragma once

// Time limits and polite polling for the waits of this folder. Every loop that waits has a
// Deadline.

#include <algorithm>
#include <chrono>
#include <thread>

namespace bellows {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

class Deadline {
public:
    explicit Deadline(Milliseconds timeout) : start_(Clock::now()), end_(start_ + timeout) {}

    bool expired() const { return Clock::now() >= end_; }
    Clock::time_point end() const { return end_; }
    Milliseconds remaining() const {
        auto left = std::chrono::ceil<Milliseconds>(end_ - Clock::now());
        return std::max(left, Milliseconds{0});
    }
    Milliseconds elapsed() const {
        return std::chrono::duration_cast<Milliseconds>(Clock::now() - start_);
    }

private:
    Clock::time_point start_;
    Clock::time_point end_;
};

/// Pauses between two polls: gives the core away first, then sleeps longer and longer (to 1 ms), so
/// that ranks which share cores do not starve the one they wait for.
class Backoff {
public:
    void pause() {
        if (rounds_ < kYields) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(sleep_);
            sleep_ = std::min(sleep_ * 2, std::chrono::microseconds{1000});
        }
        ++rounds_;
    }

private:
    static constexpr int kYields = 100;
    int rounds_ = 0;
    std::chrono::microseconds sleep_{20};
};

} // namespace bellows
