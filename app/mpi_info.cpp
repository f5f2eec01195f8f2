// SPDX-License-Identifier: MIT
#include "app/mpi_info.hpp"

#include <bellows/comm/launch.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <array>
#include <csignal>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace bellows {

namespace {

constexpr int kLimitMs = 10'000;

std::string name_of_level(int level) {
    switch (level) {
    case MPI_THREAD_SINGLE:
        return "single";
    case MPI_THREAD_FUNNELED:
        return "funneled";
    case MPI_THREAD_SERIALIZED:
        return "serialized";
    case MPI_THREAD_MULTIPLE:
        return "multiple";
    default:
        return "level " + std::to_string(level);
    }
}

/// In the child: silent, since MPI tells its troubles to everyone.
[[noreturn]] void tell_level(int to) {
    const int nowhere = ::open("/dev/null", O_RDWR);
    ::dup2(nowhere, STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
    int level = -1;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level) == MPI_SUCCESS) {
        [[maybe_unused]] const ssize_t written = ::write(to, &level, sizeof level);
        MPI_Finalize();
    }
    ::_exit(0);
}

std::string thread_level() {
    if (is_launched())
        return "not asked under a launcher";
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
        return "unknown: no pipe";
    const pid_t child = ::fork();
    if (child == 0)
        tell_level(ends[1]);
    ::close(ends[1]);
    int level = -1;
    pollfd entry{ends[0], POLLIN, 0};
    const bool told = child > 0 && ::poll(&entry, 1, kLimitMs) == 1 &&
                      ::read(ends[0], &level, sizeof level) == sizeof level;
    // The end of the pipe is the child's: MPI has been put in order.
    char more = 0;
    while (told && ::poll(&entry, 1, kLimitMs) == 1 && ::read(ends[0], &more, 1) > 0)
        ;
    ::close(ends[0]);
    if (child > 0) {
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, 0);
    }
    return told ? name_of_level(level) : "unknown: MPI does not start here";
}

} // namespace

MpiInfo mpi_info() {
    MpiInfo info;
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0, version = 0, subversion = 0;
    // Both may be called before MPI is started.
    if (MPI_Get_library_version(text.data(), &length) == MPI_SUCCESS)
        info.library.assign(text.data(), static_cast<std::size_t>(length));
    while (!info.library.empty() && (info.library.back() == '\n' || info.library.back() == '\0'))
        info.library.pop_back();
    if (MPI_Get_version(&version, &subversion) == MPI_SUCCESS)
        info.standard = std::to_string(version) + "." + std::to_string(subversion);
    info.thread_level = thread_level();
    return info;
}

} // namespace bellows
