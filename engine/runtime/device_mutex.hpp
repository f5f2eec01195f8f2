// SPDX-License-Identifier: MIT
#pragma once

// The mutex of a device. Whoever hands in work takes it again and again, and would keep the threads
// of host lanes, which wake up only when it is free, from the moments that exchanges wait for; so
// everybody else lets these go first.

#include <atomic>
#include <mutex>
#include <thread>

namespace bellows::detail {

class DeviceMutex {
public:
    /// From now on the calling thread goes first.
    static void go_first() noexcept { goes_first() = true; }

    void lock() {
        if (goes_first()) {
            if (mutex_.try_lock())
                return;
            ++num_first_;
            mutex_.lock();
            --num_first_;
            return;
        }
        constexpr int kMostLooks = 200; // they may be many, or stand in a driver
        for (int look = 0; look < kMostLooks && num_first_ > 0; ++look)
            std::this_thread::yield();
        mutex_.lock();
    }
    void unlock() { mutex_.unlock(); }

private:
    static bool& goes_first() noexcept {
        thread_local bool first = false;
        return first;
    }

    std::mutex mutex_;
    std::atomic<int> num_first_{0}; ///< that wait and go first
};

} // namespace bellows::detail
