// SPDX-License-Identifier: MIT
#pragma once

// What the launcher reads beside the ranks' reports: signals and mpirun's standard error.

#include <bellows/comm/file_descriptor.hpp>

#include <csignal>
#include <string>
#include <string_view>

namespace bellows {

struct Pipe {
    Pipe(); ///< throws Error{Io}
    FileDescriptor read, write;
};

/// SIGINT and SIGTERM as readable events while it lives.
class SignalWatch {
public:
    SignalWatch();
    ~SignalWatch();
    SignalWatch(const SignalWatch&) = delete;
    SignalWatch& operator=(const SignalWatch&) = delete;

    int fd() const { return fd_.get(); }
    const sigset_t& mask_before() const { return before_; }
    /// The signal's number, 0 if none has come.
    int take();

private:
    sigset_t before_{};
    FileDescriptor fd_;
};

/// Passes standard error on line by line, less what mpirun says about processes that it has lost:
/// that is told better by the ranks that survived.
class StderrRelay {
public:
    void take(int fd);
    void finish();

private:
    static void pass(std::string_view line);
    std::string pending_;
};

} // namespace bellows
