// SPDX-License-Identifier: MIT
#pragma once

// What the launcher knows of the ranks that it has started.

#include "deadline.hpp"

#include <bellows/comm/file_descriptor.hpp>

#include <functional>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

namespace bellows {

class LaunchedRanks {
public:
    struct Rank {
        FileDescriptor process; ///< a pidfd, which can be polled for the end
        pid_t id = 0;           ///< 0: not known
        bool gone = false;      ///< it had ended, and mpirun knew, before there was a pidfd
        bool met = false;       ///< it has been seen or heard of
        std::string phase = "while its program was starting";
        std::optional<Deadline> phase_end; ///< when it is late
        std::optional<Deadline> stopped;   ///< when it counts as lost
        bool started = false;              ///< has its World, or has ended
        bool silent = false;               ///< ended without a report
        std::optional<int> exit_code;      ///< that it has reported
    };
    using Test = std::function<bool(const Rank&)>;

    explicit LaunchedRanks(int count) : ranks_(static_cast<std::size_t>(count)) {}

    bool has(int rank) const { return rank >= 0 && rank < static_cast<int>(ranks_.size()); }
    Rank& operator[](int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
    const Rank& operator[](int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

    void meet(int rank, pid_t process);
    /// Meets those that mpirun has started and that have not reported themselves.
    void meet_children_of(pid_t mpirun);

    std::vector<int> those(const Test& test) const;
    bool all(const Test& test) const { return those(test).size() == ranks_.size(); }
    bool any(const Test& test) const { return !those(test).empty(); }
    /// Whose process has ended without a report that has been read.
    std::vector<int> ended_processes() const;
    void signal(int number) const {
        signal(number, [](const Rank&) { return true; });
    }
    void signal(int number, const Test& whom) const;

    /// "rank 1 (pid 17)".
    std::string name(int rank) const;
    /// Of one or several.
    std::string names(const std::vector<int>& ranks) const;

private:
    std::vector<Rank> ranks_;
};

} // namespace bellows
