// SPDX-License-Identifier: MIT
#include "launch_io.hpp"

#include "socket.hpp"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <sys/signalfd.h>
#include <unistd.h>

namespace bellows {

Pipe::Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0)
        throw net::errno_error("cannot create a pipe", errno);
    read = FileDescriptor(ends[0]);
    write = FileDescriptor(ends[1]);
}

SignalWatch::SignalWatch() {
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGINT);
    sigaddset(&watched, SIGTERM);
    ::pthread_sigmask(SIG_BLOCK, &watched, &before_);
    fd_ = FileDescriptor(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
}

SignalWatch::~SignalWatch() {
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

int SignalWatch::take() {
    signalfd_siginfo info{};
    const bool one = ::read(fd_.get(), &info, sizeof info) == sizeof info;
    return one ? static_cast<int>(info.ssi_signo) : 0;
}

void StderrRelay::take(int fd) {
    std::array<char, 4096> chunk;
    ssize_t got = 0;
    while ((got = ::read(fd, chunk.data(), chunk.size())) > 0)
        pending_.append(chunk.data(), static_cast<std::size_t>(got));
    std::size_t start = 0;
    for (std::size_t end; (end = pending_.find('\n', start)) != std::string::npos; start = end + 1)
        pass(std::string_view(pending_).substr(start, end + 1 - start));
    pending_.erase(0, start);
    // A progress line without an end must show, too.
    if (!pending_.empty() && pending_.front() != '[')
        finish();
}

void StderrRelay::finish() {
    pass(pending_);
    pending_.clear();
}

void StderrRelay::pass(std::string_view line) {
    for (const char* noise : {"PMIX ERROR: BAD-PARAM in file", "PMIX ERROR: PMIX_ERR_BAD_PARAM"})
        if (line.find(noise) != std::string_view::npos)
            return;
    while (!line.empty()) {
        const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
        if (written < 0 && errno != EINTR)
            return;
        if (written > 0)
            line.remove_prefix(static_cast<std::size_t>(written));
    }
}

} // namespace bellows
