// SPDX-License-Identifier: MIT

// main() of every test program that runs on several ranks.

#include "mpi_test.hpp"

#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>

namespace bellows::testing {
namespace {

/// Prints failures only, each line marked with the rank.
class OtherRankPrinter final : public ::testing::EmptyTestEventListener {
    void OnTestPartResult(const ::testing::TestPartResult& result) override {
        if (result.failed())
            std::fprintf(stderr, "[rank %d] %s:%d: %s\n", world().rank(),
                         result.file_name() ? result.file_name() : "?", result.line_number(),
                         result.message());
    }
};

/// Says, as often as kPatience has passed in one test, what this rank is in the middle of: whoever
/// reads the log of a test that was killed for its time limit sees who waited for whom.
class Watch final : public ::testing::EmptyTestEventListener {
public:
    Watch() : thread_([this] { run(); }) {}
    ~Watch() override {
        {
            const std::scoped_lock lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        thread_.join();
    }

private:
    static constexpr std::chrono::seconds kPatience{40};

    void OnTestStart(const ::testing::TestInfo& info) override {
        watch(std::string(info.test_suite_name()) + "." + info.name());
    }
    void OnTestEnd(const ::testing::TestInfo&) override { watch(""); }
    void watch(std::string test) {
        const std::scoped_lock lock(mutex_);
        test_ = std::move(test);
        seconds_ = 0;
        wake_.notify_all();
    }
    void run() {
        std::unique_lock lock(mutex_);
        while (!stop_) {
            if (wake_.wait_for(lock, kPatience) == std::cv_status::no_timeout || test_.empty())
                continue;
            seconds_ += kPatience.count();
            const std::string test = test_, seconds = std::to_string(seconds_);
            lock.unlock(); // what the rank does may stand in a driver
            say("in " + test + " for " + seconds + " s");
            say(world().control().with_activities(Error(ErrorCode::Timeout, test)).message());
            lock.lock();
        }
    }
    static void say(const std::string& text) {
        std::fprintf(stderr, "[rank %d] %s\n", world().rank(), text.c_str());
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::string test_; ///< "" between tests
    std::int64_t seconds_ = 0;
    bool stop_ = false;
    std::thread thread_; // last: it uses the others
};

int run(int argc, char** argv) {
    ::testing::InitGoogleTest(&argc, argv);
    int result = 1;
    try {
        World world = World::init(argc, argv);
        world_slot() = &world;
        auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
        if (world.rank() != 0) {
            delete listeners.Release(listeners.default_result_printer());
            listeners.Append(new OtherRankPrinter);
        }
        const auto watch = std::make_unique<Watch>();
        listeners.Append(watch.get());
        result = RUN_ALL_TESTS();
        listeners.Release(watch.get());
        world.close();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "test main: %s\n", error.what());
        result = 1;
    }
    return result;
}

} // namespace
} // namespace bellows::testing

int main(int argc, char** argv) {
    return bellows::testing::run(argc, argv);
}
