// SPDX-License-Identifier: MIT
#include "launched_ranks.hpp"

#include "process_state.hpp"

#include <cerrno>

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace bellows {

void LaunchedRanks::meet(int rank, pid_t process) {
    Rank& one = (*this)[rank];
    one.met = true;
    if (one.id != 0 || process == 0) // which is out of this process's sight
        return;
    one.id = process;
    one.process = FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
    one.gone = !one.process && errno == ESRCH;
}

void LaunchedRanks::meet_children_of(pid_t mpirun) {
    for (const pid_t child : children_of(mpirun))
        if (const int rank = rank_of_process(child); has(rank))
            meet(rank, child);
}

std::vector<int> LaunchedRanks::those(const Test& test) const {
    std::vector<int> found;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
        if (test(ranks_[rank]))
            found.push_back(static_cast<int>(rank));
    return found;
}

std::vector<int> LaunchedRanks::ended_processes() const {
    return those([](const Rank& rank) {
        pollfd entry{rank.process.get(), POLLIN, 0};
        return !rank.exit_code && (rank.gone || (rank.process && ::poll(&entry, 1, 0) == 1));
    });
}

void LaunchedRanks::signal(int number, const Test& whom) const {
    for (const Rank& rank : ranks_)
        if (rank.process && whom(rank))
            ::syscall(SYS_pidfd_send_signal, rank.process.get(), number, nullptr, 0);
}

std::string LaunchedRanks::name(int rank) const {
    const pid_t id = (*this)[rank].id;
    return "rank " + std::to_string(rank) + (id != 0 ? " (pid " + std::to_string(id) + ")" : "");
}

std::string LaunchedRanks::names(const std::vector<int>& ranks) const {
    if (ranks.size() == 1)
        return name(ranks.front());
    std::string text = "ranks";
    for (const int rank : ranks)
        text += " " + std::to_string(rank);
    return text;
}

} // namespace bellows
