// SPDX-License-Identifier: MIT
#pragma once

// A file descriptor with an owner: closed when the object goes. Any thread; one owner at a time.

#include <utility>

namespace bellows {

class FileDescriptor {
public:
    FileDescriptor() noexcept = default;
    explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept;
    ~FileDescriptor() { reset(); }

    int get() const noexcept { return fd_; }
    explicit operator bool() const noexcept { return fd_ >= 0; }
    /// Gives up ownership.
    [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
    void reset() noexcept;
    /// Another one of the same file. Throws Error{Io}.
    FileDescriptor duplicate() const;

private:
    int fd_ = -1;
};

} // namespace bellows
