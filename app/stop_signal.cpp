// SPDX-License-Identifier: MIT
#include "app/stop_signal.hpp"

#include <bellows/comm/launch.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>

#include <unistd.h>

namespace bellows {

namespace {

std::atomic<bool> asked{false};

/// Some programs send a signal to a process and to its group.
constexpr std::chrono::milliseconds kOneSignal{500};

void wait_for_signals(const sigset_t& watched) {
    std::chrono::steady_clock::time_point first;
    for (;;) {
        int number = 0;
        if (::sigwait(&watched, &number) != 0)
            continue;
        const auto now = std::chrono::steady_clock::now();
        if (!asked.exchange(true)) {
            first = now;
            if (!has_launcher()) // which has said it
                announce_stop();
        }
        if (number == SIGUSR1 || now - first < kOneSignal)
            continue;
        // Now the signal does what it does to a program that does not watch it.
        sigset_t one;
        sigemptyset(&one);
        sigaddset(&one, number);
        ::signal(number, SIG_DFL);
        ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
        ::raise(number);
    }
}

} // namespace

void watch_stop_signals() {
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGUSR1);
    sigaddset(&watched, SIGINT); // `killall -INT` sends it to the launcher and to the ranks
    // Our launcher ends ranks by SIGTERM.
    if (!has_launcher())
        sigaddset(&watched, SIGTERM);
    ::pthread_sigmask(SIG_BLOCK, &watched, nullptr);
    std::thread([watched] { wait_for_signals(watched); }).detach();
}

void announce_stop() {
    // A terminal's cursor stands behind the progress.
    std::fprintf(stderr,
                 "%sbellows: the run writes a checkpoint after this step and ends; a second signal "
                 "ends it at once\n",
                 ::isatty(STDERR_FILENO) != 0 ? "\n" : "");
}

bool stop_asked() noexcept {
    return asked;
}

} // namespace bellows
