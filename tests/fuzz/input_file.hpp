// SPDX-License-Identifier: MIT
#pragma once

// A regular file in memory that holds what the fuzzer made up.

#include <cstdint>
#include <filesystem>
#include <string>

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

namespace bellows::fuzz {

class InputFile {
public:
    InputFile(const std::uint8_t* data, std::size_t size)
        : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
        if (fd_ < 0 || ::write(fd_, data, size) != static_cast<ssize_t>(size))
            ::abort(); // not a fault of what is tested
    }
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;
    ~InputFile() { ::close(fd_); }

    std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(fd_); }

private:
    int fd_;
};

} // namespace bellows::fuzz
