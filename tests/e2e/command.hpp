// SPDX-License-Identifier: MIT
#pragma once

// A started `bellows` (or mpirun of it) with everything that it starts: its output, its ranks'
// process ids, its end. Every process is known by a mark in its environment, so that one that
// outlives the command is found wherever it went. One thread; every wait has a limit.

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

namespace bellows::e2e {

inline constexpr std::chrono::seconds kCommandLimit{240};

/// What a command has left when it has ended.
struct Finished {
    int exit_code = -1; ///< 128 + signal if one ended it, -1 if it ran past its limit
    std::string out;
    std::string errors;
    double seconds = 0;
};

using Environment = std::map<std::string, std::string>;

/// The program under test, for the driver that this test is registered for.
std::string program();
std::string mpirun();

class Command {
public:
    /// Starts `command` (program first) with `environment` over ours; output goes to files in
    /// `scratch`, which is its TMPDIR, too. Throws std::runtime_error.
    Command(const std::filesystem::path& scratch, const std::vector<std::string>& command,
            const Environment& environment = {});
    Command(const Command&) = delete;
    Command& operator=(const Command&) = delete;
    /// Kills what is left of it.
    ~Command();

    /// Waits for the end; a test failure if it does not come in time, if any process outlives it,
    /// or if the launcher's folder stays.
    Finished wait(std::chrono::seconds limit = kCommandLimit);
    bool is_running();

    /// The process of a rank, 0 if there is none (now).
    pid_t rank_process(int rank) const;
    pid_t process() const noexcept { return pid_; }
    std::string out() const;
    std::string errors() const;

private:
    std::vector<pid_t> marked_processes() const;
    void kill_all() const;

    std::filesystem::path scratch_;
    std::string mark_;
    std::filesystem::path out_, errors_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    pid_t pid_ = -1;
    int exit_code_ = -1;
    bool ended_ = false;
};

/// Asks every 2 ms until `condition` holds (true), the command has ended or the limit is over.
template <class Condition>
bool wait_until(Command& command, Condition condition, std::chrono::seconds limit = kCommandLimit);

/// Sleeps for the time between two questions.
void pause_shortly();

template <class Condition>
bool wait_until(Command& command, Condition condition, std::chrono::seconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!condition()) {
        if (!command.is_running() || std::chrono::steady_clock::now() > end)
            return condition();
        pause_shortly();
    }
    return true;
}

} // namespace bellows::e2e
