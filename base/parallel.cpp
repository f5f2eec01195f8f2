// SPDX-License-Identifier: MIT
#include <bellows/base/parallel.hpp>

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

namespace bellows {

void parallel_for(std::size_t count, const std::function<void(std::size_t)>& job) {
    constexpr std::size_t kMostThreads = 16;
    const std::size_t threads =
        std::min({std::size_t{std::thread::hardware_concurrency()}, kMostThreads, count});
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::exception_ptr error;
    const auto work = [&] {
        try {
            for (std::size_t i = next++; i < count; i = next++)
                job(i);
        } catch (...) {
            next = count;
            const std::lock_guard lock(mutex);
            if (!error)
                error = std::current_exception();
        }
    };
    {
        std::vector<std::future<void>> others; // whose destructors wait
        for (std::size_t i = 1; i < threads; ++i)
            others.push_back(std::async(std::launch::async, work));
        work();
    }
    if (error)
        std::rethrow_exception(error);
}

} // namespace bellows
