// SPDX-License-Identifier: MIT
#include <bellows/comm/phase.hpp>

#include "deadline.hpp"
#include "launch_report.hpp"

#include <bellows/comm/launch.hpp>

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <optional>
#include <unistd.h>

namespace bellows {
namespace {

constexpr Milliseconds kLauncherGoesFirst{5000};

/// Never destroyed: its thread may outlive main().
class EndWatch {
public:
    static EndWatch& of_process() {
        static EndWatch* watch = new EndWatch;
        return *watch;
    }

    void set(int rank, const std::string& phase, Milliseconds limit,
             std::function<std::string()> detail) {
        const std::lock_guard lock(mutex_);
        due_.reset();
        if (limit > Milliseconds{0}) {
            rank_ = rank;
            what_ = "did not end within " + std::to_string(limit.count()) + " ms " + phase;
            detail_ = std::move(detail);
            due_.emplace(limit + (has_launcher() ? kLauncherGoesFirst : Milliseconds{0}));
            if (!started_)
                std::thread([this] { run(); }).detach();
            started_ = true;
        }
        changed_.notify_all();
    }

private:
    [[noreturn]] void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            if (!due_)
                changed_.wait(lock);
            else if (due_->expired())
                end();
            else
                changed_.wait_until(lock, due_->end());
        }
    }

    [[noreturn]] void end() {
        std::string text = "rank " + std::to_string(rank_) + " " + what_;
        if (const std::string detail = detail_ ? detail_() : ""; !detail.empty())
            text += ": " + detail;
        if (!has_launcher()) // which tells it
            std::fprintf(stderr, "bellows: %s\n", text.c_str());
        report_exit(rank_, kPeerLostExit, text);
        ::_exit(kPeerLostExit);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::optional<Deadline> due_;
    int rank_ = -1;
    std::string what_;
    std::function<std::string()> detail_;
    bool started_ = false;
};

} // namespace

void begin_phase(int rank, const std::string& phase, std::chrono::milliseconds limit,
                 std::function<std::string()> detail) {
    EndWatch::of_process().set(rank, phase, limit, std::move(detail));
    report_phase(rank, phase, limit);
}

} // namespace bellows
